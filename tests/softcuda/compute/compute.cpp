// Kernels that compute, for the CUDA build of torch on the software driver: in place of the CUDA
// kernel of each operator, its CPU kernel runs on CPU tensors that alias the same memory.
//
// The computation is work of the current stream. It is deferred and reordered like all its work
// (SOFTCUDA_SEED), and reads and writes the pages at that time: an absent page faults, and
// discarded bytes read as poison. The outputs' shapes come from the operator's meta kernel. Without
// one, if a shape or a value depends on data, and for random numbers, whose order must not depend
// on the seed, the call waits for the stream and computes the result; only its copy to the output's
// memory is work of the stream.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "softcuda.h"

namespace {

using c10::IValue;
using torch::jit::Stack;

// Below autograd, autocast and every Python mode, and seen by no observer: a kernel's work.
struct AsKernel {
  c10::impl::ForceDispatchKeyGuard keys{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
  at::DisableRecordFunctionGuard unseen;
};

// The location of a CUDA tensor's elements. It holds no reference: the program may free the tensor
// while the work waits, as on a GPU.
struct Layout {
  void* data;
  std::vector<std::int64_t> sizes, strides;
  at::ScalarType type;

  explicit Layout(const at::Tensor& t)
      : data(t.data_ptr()),
        sizes(t.sizes().vec()),
        strides(t.strides().vec()),
        type(t.scalar_type()) {
    TORCH_CHECK(!t.is_conj() && !t.is_neg(), "softcuda computes on no conjugate or negative views");
  }
  void take(const at::Tensor& computed) const {
    TORCH_CHECK(computed.sizes() == sizes, "softcuda: a meta kernel said another shape");
    alias().copy_(computed);
  }
  at::Tensor alias() const {
    return at::from_blob(data, sizes, strides, at::TensorOptions().dtype(type));
  }
  // From its first element to its last; bytes of other views between them count too.
  SoftcudaRange range(bool is_written) const {
    std::int64_t elements = 1;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] == 0) return {data, 0, is_written};
      elements += (sizes[i] - 1) * strides[i];
    }
    return {data, static_cast<std::size_t>(elements) * c10::elementSize(type), is_written};
  }
};
using Ranges = std::vector<SoftcudaRange>;
using Part = std::variant<at::Tensor, Layout>;  // a tensor of the host, or the place of another

// An argument, for later.
class Argument {
 public:
  explicit Argument(const IValue& given) : value_(given) {
    if (given.isTensor()) {
      parts_.push_back(part(given.toTensor()));
    } else if (given.isTensorList()) {
      for (const at::Tensor& t : given.toTensorVector()) parts_.push_back(part(t));
    } else if (given.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& t : given.toOptionalTensorVector())
        parts_.push_back(t ? part(*t) : std::nullopt);
    } else {
      if (given.isDevice()) value_ = c10::Device(c10::kCPU);
      if (given.isGenerator()) value_ = IValue();
      return;
    }
    kind_ = given.isTensor() ? kTensor : given.isTensorList() ? kList : kOptionalList;
    value_ = IValue();
  }

  IValue on_host() const {
    switch (kind_) {
      case kValue:
        return value_;
      case kTensor:
        return tensor(parts_.front());
      case kList: {
        c10::List<at::Tensor> list;
        for (const auto& part : parts_) list.push_back(tensor(part));
        return list;
      }
      case kOptionalList: {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& part : parts_)
          list.push_back(part ? std::optional(tensor(part)) : std::nullopt);
        return list;
      }
    }
    return {};
  }

  void add_ranges(bool is_written, Ranges& ranges) const {
    for (const auto& part : parts_)
      if (const auto* layout = part ? std::get_if<Layout>(&*part) : nullptr)
        ranges.push_back(layout->range(is_written));
  }

 private:
  static std::optional<Part> part(const at::Tensor& t) {
    if (!t.defined()) return std::nullopt;
    TORCH_CHECK(t.layout() == c10::kStrided, "softcuda computes on strided tensors only");
    if (t.is_cuda()) return Layout(t);
    const bool number = t.unsafeGetTensorImpl()->is_wrapped_number();
    at::Tensor copy = t.clone();  // the program may change its own before the work runs
    if (number) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }
  static at::Tensor tensor(const std::optional<Part>& part) {
    if (!part) return {};
    if (const auto* host = std::get_if<at::Tensor>(&*part)) return *host;
    return std::get<Layout>(*part).alias();
  }

  enum { kValue, kTensor, kList, kOptionalList } kind_ = kValue;
  IValue value_;
  std::vector<std::optional<Part>> parts_;
};

std::vector<at::Tensor> tensors_of(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  return {};
}

// Work of a stream. A failure then has no caller to report to.
struct Job {
  std::string name;
  std::function<void()> work;

  static void run(void* data) {
    const auto& job = *static_cast<Job*>(data);
    try {
      const AsKernel as_kernel;
      job.work();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "softcuda: %s failed on its stream: %s\n", job.name.c_str(),
                   error.what());
      std::abort();
    }
  }
  static void drop(void* data) { delete static_cast<Job*>(data); }
};

void enqueue(const std::string& name, const Ranges& ranges, std::function<void()> work) {
  auto job = std::make_unique<Job>(Job{name, std::move(work)});
  const SoftcudaKernel kernel{name.c_str(), ranges.data(), ranges.size()};
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const int error =
      softcuda_enqueue(stream.stream(), &kernel, Job::run, Job::drop, job.release(), 0);
  TORCH_CHECK(error == 0, "the software driver refused a kernel: error ", error);
}

at::Tensor empty_like_on_device(const at::Tensor& t) {
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kCUDA));
}

// The operator's call, its arguments by their place in the schema.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), stack_(stack), first_(stack->size() - op.schema().arguments().size()) {}

  void run() {
    if (!at_once() && with_known_shapes()) return;
    now();
  }

 private:
  const c10::FunctionSchema& schema() const { return op_.schema(); }
  const IValue& given(std::size_t i) const { return (*stack_)[first_ + i]; }
  std::size_t count() const { return schema().arguments().size(); }
  static bool written(const c10::AliasInfo* alias) { return alias && alias->isWrite(); }
  bool is_out(std::size_t i) const { return schema().arguments()[i].is_out(); }

  // The argument that is returned; null for a new value.
  const IValue* returned_argument(const c10::Argument& result) const {
    if (!written(result.alias_info())) return nullptr;
    for (std::size_t i = 0; i < count(); ++i) {
      const c10::AliasInfo* alias = schema().arguments()[i].alias_info();
      if (written(alias) && alias->beforeSets() == result.alias_info()->beforeSets())
        return &given(i);
    }
    TORCH_CHECK(false, "softcuda: what ", schema().name(), " returns is none of its arguments");
  }

  bool at_once() const {
    for (const at::Tag tag : {at::Tag::nondeterministic_seeded, at::Tag::data_dependent_output,
                              at::Tag::dynamic_output_shape})
      if (op_.hasTag(tag)) return true;
    for (const c10::Argument& argument : schema().arguments())
      if (argument.type()->str().find("Generator") != std::string::npos) return true;
    for (const c10::Argument& result : schema().returns())
      if (result.type()->str().find("Tensor") == std::string::npos) return true;
    return false;
  }

  bool all_in_place() const {
    for (std::size_t i = 0; i < count(); ++i)
      if (is_out(i)) return false;
    for (const c10::Argument& result : schema().returns())
      if (!written(result.alias_info())) return false;
    return true;
  }

  std::vector<Argument> arguments() const {
    std::vector<Argument> all;
    for (std::size_t i = 0; i < count(); ++i) all.emplace_back(given(i));
    return all;
  }

  // All arguments, except one to be filled, which is neither read nor written here.
  Ranges ranges(const std::vector<Argument>& arguments, bool with_out) const {
    Ranges all;
    for (std::size_t i = 0; i < count(); ++i)
      if (with_out || !is_out(i))
        arguments[i].add_ranges(written(schema().arguments()[i].alias_info()), all);
    return all;
  }

  std::string name() const { return c10::toString(op_.operator_name()); }

  // False: its shapes are not known without its values.
  bool with_known_shapes() {
    std::vector<IValue> results;
    if (!all_in_place()) {
      std::optional<Stack> meta = run_on_meta();
      if (!meta) return false;
      for (std::size_t k = 0; k < schema().returns().size(); ++k)
        results.push_back(prepare(schema().returns()[k], (*meta)[k]));
    } else {
      for (const c10::Argument& result : schema().returns())
        results.push_back(*returned_argument(result));
    }
    std::vector<std::vector<std::optional<Layout>>> fresh(results.size());
    for (std::size_t k = 0; k < results.size(); ++k)
      if (!written(schema().returns()[k].alias_info()))
        for (const at::Tensor& t : tensors_of(results[k]))
          fresh[k].push_back(t.defined() ? std::optional(Layout(t)) : std::nullopt);
    std::vector<Argument> args = arguments();
    Ranges touched = ranges(args, true);
    for (const auto& tensors : fresh)
      for (const auto& layout : tensors)
        if (layout) touched.push_back(layout->range(true));
    enqueue(name(), touched, [op = op_, args = std::move(args), fresh = std::move(fresh)] {
      Stack stack;
      for (const Argument& argument : args) stack.push_back(argument.on_host());
      op.callBoxed(&stack);
      for (std::size_t k = 0; k < fresh.size(); ++k) {
        const std::vector<at::Tensor> computed = tensors_of(stack[k]);
        for (std::size_t i = 0; i < fresh[k].size(); ++i)
          if (fresh[k][i]) fresh[k][i]->take(computed[i]);
      }
    });
    finish(std::move(results));
    return true;
  }

  void finish(std::vector<IValue> results) {
    stack_->resize(first_);
    for (IValue& result : results) stack_->push_back(std::move(result));
  }

  // The results on tensors without data; nothing if the operator does not support that.
  std::optional<Stack> run_on_meta() {
    std::unordered_map<c10::TensorImpl*, at::Tensor> known;
    const auto meta_of = [&](const at::Tensor& t) -> at::Tensor {
      if (!t.defined()) return {};
      if (!t.is_cuda()) return t;
      at::Tensor& made = known[t.unsafeGetTensorImpl()];
      if (!made.defined())
        made = at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta));
      return made;
    };
    Stack meta;
    try {
      const AsKernel as_kernel;
      for (std::size_t i = 0; i < count(); ++i) {
        const IValue& value = given(i);
        if (value.isTensor()) {
          meta.push_back(meta_of(value.toTensor()));
        } else if (value.isTensorList()) {
          c10::List<at::Tensor> list;
          for (const at::Tensor& t : value.toTensorVector()) list.push_back(meta_of(t));
          meta.push_back(list);
        } else if (value.isOptionalTensorList()) {
          c10::List<std::optional<at::Tensor>> list;
          for (const auto& t : value.toOptionalTensorVector())
            list.push_back(t ? std::optional(meta_of(*t)) : std::nullopt);
          meta.push_back(list);
        } else {
          meta.push_back(value.isDevice() ? IValue(c10::Device(c10::kMeta)) : value);
        }
      }
      op_.callBoxed(&meta);
    } catch (const c10::Error&) {  // NotImplemented or wrong arguments: the CPU kernel reports it
      return std::nullopt;
    }
    for (std::size_t i = 0; i < count(); ++i)
      if (is_out(i) && given(i).isTensor())
        resize(given(i).toTensor(), known.at(given(i).toTensor().unsafeGetTensorImpl()));
    return meta;
  }

  static void resize(const at::Tensor& out, const at::Tensor& like) {
    if (out.sizes() == like.sizes()) return;
    out.resize_(like.sizes());
    if (out.strides() != like.strides()) out.as_strided_(like.sizes(), like.strides());
  }

  IValue prepare(const c10::Argument& result, const IValue& like) const {
    if (const IValue* same = returned_argument(result)) return *same;
    if (like.isTensor()) {
      const at::Tensor& t = like.toTensor();
      return t.defined() ? empty_like_on_device(t) : at::Tensor();
    }
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : like.toTensorVector())
      list.push_back(t.defined() ? empty_like_on_device(t) : at::Tensor());
    return list;
  }

  Stack computed_on_host() const {
    Stack host;
    for (std::size_t i = 0; i < count(); ++i) {
      if (is_out(i) && given(i).isTensor())
        host.push_back(at::empty({0}, given(i).toTensor().options().device(c10::kCPU)));
      else
        host.push_back(Argument(given(i)).on_host());
    }
    op_.callBoxed(&host);
    return host;
  }

  void now() {
    TORCH_CHECK(c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None,
                "softcuda: ", schema().name(),
                " needs its values at the call, and a graph is being captured");
    Stack host;
    std::exception_ptr failure;
    // On its stream too: until then, nothing moves its inputs.
    enqueue(name(), ranges(arguments(), false), [&] {
      try {
        host = computed_on_host();
      } catch (...) {
        failure = std::current_exception();
      }
    });
    c10::cuda::getCurrentCUDAStream().synchronize();
    if (failure) std::rethrow_exception(failure);
    TORCH_CHECK(host.size() == schema().returns().size(), "softcuda: ", schema().name(),
                " was skipped");
    std::vector<IValue> results;
    for (std::size_t k = 0; k < schema().returns().size(); ++k) {
      const c10::Argument& result = schema().returns()[k];
      if (const IValue* same = returned_argument(result)) {
        if (same->isTensor() && host[k].isTensor() && is_result_of_out(result)) {
          resize(same->toTensor(), host[k].toTensor());
          write(same->toTensor(), host[k].toTensor());
        }
        results.push_back(*same);
      } else if (host[k].isTensor() || host[k].isTensorList()) {
        results.push_back(prepare(result, host[k]));
        const std::vector<at::Tensor> to = tensors_of(results.back()), from = tensors_of(host[k]);
        for (std::size_t i = 0; i < to.size(); ++i)
          if (to[i].defined()) write(to[i], from[i]);
      } else {
        results.push_back(host[k]);
      }
    }
    finish(std::move(results));
  }

  bool is_result_of_out(const c10::Argument& result) const {
    for (std::size_t i = 0; i < count(); ++i) {
      const c10::AliasInfo* alias = schema().arguments()[i].alias_info();
      if (is_out(i) && alias && alias->beforeSets() == result.alias_info()->beforeSets())
        return true;
    }
    return false;
  }

  // As work of the stream: the memory may have been given to it just now.
  void write(const at::Tensor& to, const at::Tensor& from) const {
    const Layout place(to);
    enqueue(name(), {place.range(true)}, [place, from] { place.take(from); });
  }

  c10::OperatorHandle op_;
  Stack* stack_;
  std::size_t first_;
};

// The wrappers of the replaced kernels would make their tensors' device current.
std::optional<c10::Device> device_of(const Stack& stack, std::size_t arguments) {
  for (std::size_t i = stack.size() - arguments; i < stack.size(); ++i) {
    for (const at::Tensor& t : tensors_of(stack[i]))
      if (t.defined() && t.is_cuda()) return t.device();
    if (stack[i].isDevice() && stack[i].toDevice().is_cuda()) return stack[i].toDevice();
  }
  return std::nullopt;
}

void compute(const c10::OperatorHandle& op, Stack* stack) {
  const c10::OptionalDeviceGuard guard(device_of(*stack, op.schema().arguments().size()));
  Call(op, stack).run();
}

// On one device a kernel; between host and device torch's own, whose copies the driver makes.
at::Tensor& copy(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (!self.is_cuda() || !from.is_cuda() || self.device() != from.device())
    return at::native::copy_(self, from, non_blocking);
  const c10::DeviceGuard guard(self.device());
  const at::Tensor source = from.expand_as(self);
  const Layout to(self), origin(source);
  enqueue("aten::copy_", {to.range(true), origin.range(false)},
          [to, origin] { to.alias().copy_(origin.alias()); });
  return self;
}

// An operator whose CUDA kernel would not write its outputs.
void refuse(const c10::OperatorHandle& op, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "softcuda: ", op.schema().name(),
                              " has no CPU kernel, and no decomposition in tests/softcuda/compute");
}

// A fused cell of an LSTM, by operators that compute: gates, cell state and output.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cx,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  at::Tensor gates = input_gates + hidden_gates;
  if (input_bias && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  const std::vector<at::Tensor> part = gates.chunk(4, 1);
  const at::Tensor i = part[0].sigmoid(), f = part[1].sigmoid(), g = part[2].tanh(),
                   o = part[3].sigmoid();
  const at::Tensor cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

// Its backward: the gradients of the gates, of the cell state before, and of the biases.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const std::optional<at::Tensor>& grad_hy, const std::optional<at::Tensor>& grad_cy,
    const at::Tensor& cx, const at::Tensor& cy, const at::Tensor& gates, bool has_bias) {
  const std::vector<at::Tensor> part = gates.chunk(4, 1);
  const at::Tensor &i = part[0], &f = part[1], &g = part[2], &o = part[3];
  const auto given = [](const std::optional<at::Tensor>& grad) { return grad && grad->defined(); };
  const at::Tensor squashed = cy.tanh();
  const at::Tensor gh = given(grad_hy) ? *grad_hy : at::zeros_like(cy);
  at::Tensor gc = gh * o * (1 - squashed * squashed);
  if (given(grad_cy)) gc = gc + *grad_cy;
  at::Tensor grad = at::cat({gc * g * i * (1 - i), gc * cx * f * (1 - f), gc * i * (1 - g * g),
                             gh * squashed * o * (1 - o)},
                            1);
  at::Tensor bias = has_bias ? grad.sum(0) : at::Tensor();
  return {std::move(grad), gc * f, std::move(bias)};
}

// Views, ops that create or change storage, and ops that query the driver keep their own kernels.
bool kept(const c10::OperatorHandle& op) {
  static const char* const kNames[] = {"aten::is_set_to",
                                       "aten::empty",
                                       "aten::set_",
                                       "aten::resize_",
                                       "aten::_local_scalar_dense",
                                       "aten::record_stream",
                                       "aten::is_pinned",
                                       "aten::_pin_memory",
                                       "aten::_efficientzerotensor",
                                       "aten::copy_",
                                       "aten::convolution",
                                       "aten::convolution_backward"};
  const std::string& name = op.schema().name();
  for (const char* own : kNames)
    if (name == own || (std::string(own) == "aten::empty" && name.rfind(own, 0) == 0)) return true;
  for (const c10::Argument& result : op.schema().returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

bool decomposed(const std::string& name) {
  return name == "aten::_thnn_fused_lstm_cell" ||
         name == "aten::_thnn_fused_lstm_cell_backward_impl";
}

std::size_t install() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  std::size_t count = 0;
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || kept(*op)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    const std::string full =
        name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
      if (!decomposed(name.name))
        library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse>());
      continue;
    }
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>());
    ++count;
  }
  library->impl("aten::_thnn_fused_lstm_cell", lstm_cell);
  library->impl("aten::_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library->impl("aten::convolution", torch::CppFunction::makeFromBoxedFunction<&compute>());
  library->impl("aten::convolution_backward",
                torch::CppFunction::makeFromBoxedFunction<&compute>());
  library->impl("aten::copy_", copy);
  return count + 5;
}

}  // namespace

// Called once per process, after `import torch`. Returns the number of operators that now compute.
extern "C" __attribute__((visibility("default"))) std::size_t softcuda_compute() {
  static const std::size_t count = install();
  return count;
}
