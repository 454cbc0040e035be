#include "torch_ext/observer.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#ifdef UMEM_WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "base/thread_role.h"
#include "base/units.h"
#include "residency/op_family.h"
#include "runtime/alloc.h"
#include "runtime/awaited.h"
#include "runtime/ops.h"
#include "torch_ext/guessed_steps.h"
#include "torch_ext/thread_state.h"

namespace umem::torch_ext {
namespace {

using residency::Family;
using residency::Tag;
using runtime::Phase;

// The storages that an op uses, and the GPU of one of them (-1: none). An argument that it
// overwrites counts only with tensors that are their whole storage (`whole`), or only with the
// others.
struct Reads {
  std::vector<runtime::Input>& inputs;
  c10::DeviceIndex gpu = -1;
  enum class Only { kAll, kWhole, kParts } only = Only::kAll;
};

// The part of a storage in several pieces, actual or possible, that contains the tensor. A tensor
// without strides uses all of it, one without elements nothing.
runtime::Input part_of(const c10::TensorImpl& tensor, const void* data, std::size_t bytes) {
  runtime::Input all{data};
  if (bytes < 2 * kPageBytes || tensor.has_symbolic_sizes_strides() ||
      tensor.layout() != c10::kStrided || tensor.key_set().has(c10::DispatchKey::NestedTensor))
    return all;
  if (tensor.numel() == 0) return {};
  std::int64_t last = 0;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  for (std::size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
  const std::size_t item = tensor.itemsize();
  const std::size_t used = (static_cast<std::size_t>(last) + 1) * item;
  const std::size_t offset = static_cast<std::size_t>(tensor.storage_offset()) * item;
  if (used >= bytes || offset > bytes - used) return all;
  return {data, offset, used};
}

bool is_whole(const c10::TensorImpl& tensor, const c10::Storage& storage) {
  // The accessors that do not throw: umem's tensors have no symbolic sizes.
  if (tensor.has_symbolic_sizes_strides()) return false;
  // Elements that are there twice, as after expand(), would count as others.
  return static_cast<std::size_t>(tensor.numel()) * tensor.itemsize() >=
             storage.unsafeGetStorageImpl()->nbytes() &&
         tensor.is_non_overlapping_and_dense();
}

// Storage by storage, by the accessors that neither throw (fake tensors) nor copy (copy-on-write):
// undefined, meta and wrapper tensors have no address and are passed over.
void add_storage(const c10::TensorImpl& tensor, Reads& reads) {
  const c10::Storage& storage = tensor.unsafe_storage();
  if (!storage) return;
  const c10::DataPtr& data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (!data.get()) return;
  if (reads.only != Reads::Only::kAll &&
      (reads.only == Reads::Only::kWhole) != is_whole(tensor, storage))
    return;
  const std::size_t bytes = storage.unsafeGetStorageImpl()->nbytes();
  runtime::Input used = part_of(tensor, data.get(), bytes);
  used.size = bytes;
  used.on_gpu = data.device().is_cuda();
  if (used.storage) reads.inputs.push_back(used);
  if (used.on_gpu) reads.gpu = data.device().index();
}

// A sparse tensor consists of others. Fake ones have the layout and not the type.
void add_tensor(const c10::TensorImpl& tensor, Reads& reads) {
  const c10::DispatchKeySet keys = tensor.key_set();
  if (keys.has_all(c10::sparse_ks)) {
    const auto* coo = dynamic_cast<const at::SparseTensorImpl*>(&tensor);
    if (!coo) return;
    add_storage(*coo->indices().unsafeGetTensorImpl(), reads);
    add_storage(*coo->values().unsafeGetTensorImpl(), reads);
  } else if (keys.has_any(c10::sparse_csr_ks)) {
    const auto* csr = dynamic_cast<const at::SparseCsrTensorImpl*>(&tensor);
    if (!csr) return;
    add_storage(*csr->compressed_indices().unsafeGetTensorImpl(), reads);
    add_storage(*csr->plain_indices().unsafeGetTensorImpl(), reads);
    add_storage(*csr->values().unsafeGetTensorImpl(), reads);
  } else {
    add_storage(tensor, reads);
  }
}

// True if there is any tensor. Lists are homogeneous except for None, so the first other value ends
// the scan of a list of sizes. Collectives take lists of lists.
bool add_value(const c10::IValue& value, Reads& reads) {
  if (value.isTensor()) {
    add_tensor(*value.unsafeToTensorImpl(), reads);
    return true;
  }
  if (!value.isList()) return false;
  bool any = false;
  for (const c10::IValue& item : value.toListRef()) {
    if (item.isNone()) continue;
    if (!item.isTensor() && !item.isList()) break;
    any |= add_value(item, reads);
  }
  return any;
}

// The inputs of an op that writes some of them: overwritten ones, then others that it writes, then
// those that it reads.
bool add_written_first(const at::RecordFunction& fn, const OpInfo& info, runtime::Op& op,
                       Reads& reads) {
  bool any = false;
  const auto inputs = fn.inputs();
  const std::size_t count = std::min(inputs.size(), info.uses.size());
  const auto add = [&](Use use, Reads::Only only) {
    reads.only = only;
    for (std::size_t i = 0; i < count; ++i)
      if (info.uses[i] == use) any |= add_value(inputs[i], reads);
  };
  add(Use::kOverwrites, Reads::Only::kWhole);
  op.n_overwritten = static_cast<std::uint32_t>(reads.inputs.size());
  add(Use::kOverwrites, Reads::Only::kParts);
  add(Use::kChanges, Reads::Only::kAll);
  op.n_written = static_cast<std::uint32_t>(reads.inputs.size());
  add(Use::kReads, Reads::Only::kAll);
  for (std::size_t i = count; i < inputs.size(); ++i) any |= add_value(inputs[i], reads);
  return any;
}

bool add_inputs(const at::RecordFunction& fn, const OpInfo& info, runtime::Op& op, Reads& reads) {
  if (!info.uses.empty()) return add_written_first(fn, info, op, reads);
  bool any = false;
  for (const c10::IValue& value : fn.inputs()) any |= add_value(value, reads);
  return any;
}

// True if autograd will keep a history of the results.
bool wants_gradient(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().requires_grad();
  if (!value.isList()) return false;
  for (const c10::IValue& item : value.toListRef()) {
    if (!item.isTensor() && !item.isNone()) break;
    if (item.isTensor() && item.toTensor().requires_grad()) return true;
  }
  return false;
}

// Below autograd tensors no longer show it: inside an op the outermost op knows.
bool knows_of_autograd(const OpRecord* parent) {
  return parent && (!parent->op.scope_marker || parent->kind == OpKind::kCompiled);
}

bool is_recorded(const OpRecord* parent, const at::RecordFunction& fn) {
  if (knows_of_autograd(parent)) return parent->recorded;
  if (!c10::GradMode::is_enabled()) return false;
  const auto inputs = fn.inputs();
  return std::any_of(inputs.begin(), inputs.end(), wants_gradient);
}

// The outermost op that means something names the family: a softmax inside attention is attention.
// Directly in a node, with gradients on, it is a forward pass that a checkpoint runs again.
Family family_within(const OpRecord* parent, Family own) {
  if (!parent) return own;
  if (parent->kind == OpKind::kBackward && c10::GradMode::is_enabled()) return own;
  const Family outer = parent->op.family;
  return outer == Family::kNone || outer == Family::kOther ? own : outer;
}

Phase phase_within(const OpRecord* parent, OpKind kind) {
  if (kind == OpKind::kOptimizer) return Phase::kOptimizer;
  if (kind == OpKind::kBackward || kind == OpKind::kAccumulateGrad) return Phase::kBackward;
  if (!parent) return Phase::kForward;
  // With gradients on it is the closure of the optimizer's step: a forward pass.
  const bool closure = parent->kind == OpKind::kOptimizer && c10::GradMode::is_enabled();
  return closure ? Phase::kForward : parent->op.phase;
}

bool is_scope_marker(OpKind kind) {
  return kind == OpKind::kBackward || kind == OpKind::kAccumulateGrad ||
         kind == OpKind::kOptimizer || kind == OpKind::kCompiled;
}

// The stream at which the op's inputs must arrive: the current one of its GPU on this thread, known
// without a driver call.
void set_stream([[maybe_unused]] runtime::Op& op, [[maybe_unused]] c10::DeviceIndex gpu) {
#ifdef UMEM_WITH_CUDA
  op.device = gpu;  // -1: not an op of one GPU; its blocks are used where they were allocated
  if (gpu >= 0)
    op.stream = reinterpret_cast<std::uintptr_t>(c10::cuda::getCurrentCUDAStream(gpu).stream());
#endif
}

// The input becomes, or is added to, the leaf's gradient.
void tag_gradients(const std::vector<runtime::Input>& inputs) {
  for (const runtime::Input& input : inputs) runtime::tag(input.storage, Tag::kGrad);
}

// The tag of the blocks that the op allocates and leaves: its results, and tensors saved for the
// backward pass.
Tag result_tag(const OpRecord& record) {
  if (record.feeds_grad) return Tag::kGrad;
  if (record.recorded) return Tag::kActivation;  // in backward: recomputed for it
  if (record.op.phase == Phase::kOptimizer) return Tag::kOptimizer;
  const bool made_by_program = record.op.phase == Phase::kForward && !record.parent;
  return made_by_program && !record.reads_tensors ? Tag::kInput : Tag::kTemp;
}

// Fetches contents before an op, or before a view through which they could be read without one.
// Fetching runs ops, which use the thread's list too.
void await_inputs(const at::RecordFunction& fn) {
  std::vector<runtime::Input> inputs;
  Reads reads{inputs};
  for (const c10::IValue& value : fn.inputs()) add_value(value, reads);
  if (!inputs.empty()) runtime::await_contents(inputs.data(), inputs.size());
}

GuessedSteps g_steps;

// True if ops compute shapes alone, as when torch.compile traces the passes of a step.
bool is_tracing() {
  using c10::impl::TorchDispatchModeKey;
  using c10::impl::TorchDispatchModeTLS;
  return TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE).has_value() ||
         TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value() ||
         TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FUNCTIONAL).has_value();
}

// The information from an op's name and the enclosing op.
void describe(OpRecord& record, const OpInfo& info, OpRecord* parent) {
  record.kind = info.kind;
  record.parent = parent;
  record.feeds_grad = info.kind == OpKind::kAccumulateGrad || (parent && parent->feeds_grad);
  record.op.name = info.label;
  record.op.collective = info.collective;
  record.op.exchanges = info.exchanges;
  record.op.family = family_within(parent, info.family);
  record.op.phase = phase_within(parent, info.kind);
  record.op.scope_marker = is_scope_marker(info.kind);
}

void begin(ThreadState& state, OpRecord& record) {
  // A policy that is asked for victims may run ops, which use the thread's list, too.
  std::vector<runtime::Input> inputs = std::exchange(state.inputs_of_op, {});
  runtime::op_begin(&record.op, inputs.data(), inputs.size());
  state.inputs_of_op = std::move(inputs);
  state.top = &record;
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& fn) {
  ThreadState* state = thread_state();
  if (!state) return nullptr;
  if (runtime::awaiting()) await_inputs(fn);  // first: ops that it runs look up names too
  const OpInfo& info = state->names.find(fn);
  OpRecord* parent = state->top;
  // Memory that an op takes for itself is the op's: the allocator sees it by the stack.
  const bool inner_factory = info.kind == OpKind::kFactory && parent;
  if (info.kind == OpKind::kIgnored || inner_factory) return nullptr;
  std::unique_ptr<OpRecord> record(new OpRecord);  // make_unique would clear its pin array
  describe(*record, info, parent);
  const bool may_record = !record->op.scope_marker || info.kind == OpKind::kCompiled;
  record->recorded = may_record && is_recorded(parent, fn);
  // A node outside the engine is one that compiled code applies in its forward pass.
  const bool node = !parent && std::string_view(info.name).starts_with(residency::kEvaluate);
  if (!parent && (node || record->recorded) && !is_tracing()) {
    if (node) g_steps.backward();
    if (record->recorded) {
      runs_steps();
      g_steps.forward();  // may run ops itself
    }
  }
  std::vector<runtime::Input>& inputs = state->inputs_of_op;
  inputs.clear();
  Reads reads{inputs};
  // The ops inside a scope bring in what they need themselves; empty_like reads the shape
  // only.
  const bool has_reads =
      !record->op.scope_marker && info.kind != OpKind::kFactory && !info.shape_only;
  record->reads_tensors = info.shape_only;
  if (has_reads || info.kind == OpKind::kAccumulateGrad)
    record->reads_tensors = add_inputs(fn, info, record->op, reads);
  if (info.kind == OpKind::kAccumulateGrad) tag_gradients(inputs);
  if (record->op.scope_marker)
    inputs.clear();
  else
    set_stream(record->op, reads.gpu);
  begin(*state, *record);
  return record;
}

void on_end(const at::RecordFunction&, at::ObserverContext* context) {
  ThreadState* state = thread_state();
  if (!context || !state) return;
  auto& record = static_cast<OpRecord&>(*context);
  state->top = record.parent;
  runtime::op_end(&record.op, result_tag(record));
  const bool outermost = !record.parent || record.parent->op.phase != Phase::kOptimizer;
  if (record.kind == OpKind::kOptimizer && outermost) g_steps.optimizer_stepped();
}

// In the runtime's order: written blocks first.
void add_kernel_inputs(std::span<const KernelArgument> arguments, runtime::Op& op, Reads& reads) {
  const auto add = [&](bool written) {
    for (const KernelArgument& argument : arguments)
      if (argument.written == written) add_storage(*argument.tensor, reads);
  };
  add(true);
  op.n_written = static_cast<std::uint32_t>(reads.inputs.size());
  add(false);
}

void await_kernel_inputs(std::span<const KernelArgument> arguments) {
  std::vector<runtime::Input> inputs;
  Reads reads{inputs};
  for (const KernelArgument& argument : arguments) add_storage(*argument.tensor, reads);
  if (!inputs.empty()) runtime::await_contents(inputs.data(), inputs.size());
}

std::atomic<bool> g_observing{false};
std::mutex g_observer_mutex;
at::CallbackHandle g_handle = at::INVALID_CALLBACK_HANDLE;

at::CallbackHandle add_callback() {
  return at::addGlobalCallback(
      at::RecordFunctionCallback(on_start, on_end)
          .needsInputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION,
                   at::RecordScope::USER_SCOPE}));
}

// A thread's first op, and any op after a change, copies torch's list of callbacks under torch's
// lock. fork() blocks all threads that allocate, and copying a list with entries allocates: in the
// child the lock would belong to a thread that does not exist. An empty list is copied without
// allocating, so the observer leaves the list during a fork. Ops that begin meanwhile are not seen.
void prepare_fork() {
  g_observer_mutex.lock();
  lock_names_for_fork();
  if (g_handle != at::INVALID_CALLBACK_HANDLE) at::removeCallback(g_handle);
}

// The last action before the fork. Removing the observer has sent every thread that runs ops to
// torch's lock: one that was preempted there must run again before the child is made.
void wait_for_torch_lock() {
  constexpr int kRounds = 8;
  for (int round = 0; round < kRounds; ++round) {
    at::hasGlobalCallbacks();  // takes the lock
    std::this_thread::yield();
  }
}

// Handlers run before a fork in the reverse order of their registration: this one runs after the
// runtime's and the device's, which may wait.
const int g_registered = pthread_atfork(&wait_for_torch_lock, nullptr, nullptr);

void end_fork() {
  if (g_handle != at::INVALID_CALLBACK_HANDLE) g_handle = add_callback();
  g_observer_mutex.unlock();
}

void end_fork_in_parent() {
  unlock_names_in_parent();
  end_fork();
}

void end_fork_in_child() {
  unlock_names_in_child();
  end_fork();
}

void register_fork_handlers() {
  static std::once_flag once;
  std::call_once(once,
                 [] { pthread_atfork(&prepare_fork, &end_fork_in_parent, &end_fork_in_child); });
}

}  // namespace

bool observing() {
  return g_observing.load(std::memory_order_relaxed);
}

std::unique_ptr<OpRecord> begin_kernel(const OpInfo& info,
                                       std::span<const KernelArgument> arguments) {
  ThreadState* state = observing() ? thread_state() : nullptr;
  if (!state) return nullptr;
  if (runtime::awaiting()) await_kernel_inputs(arguments);
  std::unique_ptr<OpRecord> record(new OpRecord);
  OpRecord* parent = state->top;
  describe(*record, info, parent);
  record->recorded = knows_of_autograd(parent) && parent->recorded;
  record->reads_tensors = !arguments.empty();
  state->inputs_of_op.clear();
  Reads reads{state->inputs_of_op};
  add_kernel_inputs(arguments, record->op, reads);
  set_stream(record->op, reads.gpu);
  begin(*state, *record);
  return record;
}

void end_kernel(std::unique_ptr<OpRecord> record) {
  ThreadState* state = thread_state();
  if (!record || !state) return;
  // Innermost, nearly always; regions of a program can end out of order.
  OpRecord** link = &state->top;
  while (*link && *link != record.get()) link = &(*link)->parent;
  if (*link) *link = record->parent;
  runtime::op_end(&record->op, result_tag(*record));
}

void install_observer() {
  std::lock_guard guard(g_observer_mutex);
  if (g_handle != at::INVALID_CALLBACK_HANDLE) return;
  register_fork_handlers();
  g_steps.reset();
  g_handle = add_callback();
  g_observing = true;
}

void remove_observer() {
  std::lock_guard guard(g_observer_mutex);
  if (g_handle == at::INVALID_CALLBACK_HANDLE) return;
  at::removeCallback(g_handle);
  g_handle = at::INVALID_CALLBACK_HANDLE;
  g_observing = false;
}

}  // namespace umem::torch_ext
