#include "torch_ext/kernels.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/kept_names.h"
#include "python/lock.h"
#include "residency/op_family.h"
#include "torch_ext/observer.h"

namespace py = pybind11;

namespace umem::torch_ext {
namespace {

// Never destroyed: traces and plans keep the name. With the GIL held.
const OpInfo& info_of(const std::string& name) {
  static auto* known = new std::unordered_map<std::string, OpInfo>;
  const auto [found, made] = known->try_emplace(kept_name(*known, name));
  OpInfo& info = found->second;
  if (made) {
    info.name = info.key = found->first;
    info.label = info.name.c_str();
    info.family = residency::family_of(info.name);
  }
  return info;
}

// A number that every tensor of Python has, so that this needs none of torch's libraries for
// Python.
const c10::TensorImpl* tensor_of(PyObject* value) {
  static PyObject* const name = PyUnicode_InternFromString("_cdata");
  PyObject* const address = PyObject_GetAttr(value, name);
  void* const tensor = address ? PyLong_AsVoidPtr(address) : nullptr;
  Py_XDECREF(address);
  if (!tensor) PyErr_Clear();
  return static_cast<const c10::TensorImpl*>(tensor);
}

// Spans a kernel's begin and end, even if it raises.
class Running {
 public:
  Running(const OpInfo& info, const std::vector<KernelArgument>& arguments) {
    const python::Unlocked unlocked;
    record_ = begin_kernel(info, arguments);
  }
  ~Running() {
    if (thread_ == std::this_thread::get_id())
      end();
    else
      (void)record_.release();  // it is on the stack of a thread that did not end it
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  void end() {
    if (!record_) return;
    if (thread_ != std::this_thread::get_id())
      throw std::runtime_error("an operator has to end on the thread that it began on");
    const python::Unlocked unlocked;
    end_kernel(std::move(record_));
  }

 private:
  std::thread::id thread_ = std::this_thread::get_id();
  std::unique_ptr<OpRecord> record_;
};

// The tensors of a program's own kernel, kept alive by the caller.
std::unique_ptr<Running> begin_region(const std::string& name, const py::list& written,
                                      const py::list& read) {
  std::vector<KernelArgument> arguments;
  const auto add = [&](const py::list& tensors, bool writes) {
    for (const py::handle tensor : tensors)
      if (const c10::TensorImpl* found = tensor_of(tensor.ptr()))
        arguments.push_back({found, writes});
  };
  add(written, true);
  add(read, false);
  return std::make_unique<Running>(info_of(name), arguments);
}

// `uses` gives the kernel's use of each positional argument, in order: r reads, w writes. Others
// are not tensors.
class Kernel {
 public:
  Kernel(const std::string& name, std::string uses, py::object function)
      : info_(info_of(name)), uses_(std::move(uses)), function_(std::move(function)) {}

  py::object call(const py::args& args, const py::kwargs& kwargs) const {
    if (!observing()) return function_(*args, **kwargs);
    std::vector<KernelArgument> arguments;
    arguments.reserve(uses_.size());
    const std::size_t count = std::min<std::size_t>(uses_.size(), args.size());
    for (std::size_t i = 0; i < count; ++i) {
      if (uses_[i] != 'r' && uses_[i] != 'w') continue;
      if (const c10::TensorImpl* tensor = tensor_of(PyTuple_GET_ITEM(args.ptr(), i)))
        arguments.push_back({tensor, uses_[i] == 'w'});
    }
    const Running running(info_, arguments);
    return function_(*args, **kwargs);
  }

  const std::string& name() const { return info_.name; }
  const std::string& uses() const { return uses_; }
  const py::object& function() const { return function_; }

 private:
  const OpInfo& info_;
  std::string uses_;
  py::object function_;
};

}  // namespace

void bind_kernels(py::module_& module) {
  py::class_<Kernel>(module, "Kernel", "A kernel whose calls umem sees as an op.")
      .def(py::init<const std::string&, std::string, py::object>(), py::arg("name"),
           py::arg("uses"), py::arg("function"))
      .def("__call__", &Kernel::call)
      .def_property_readonly("name", &Kernel::name)
      .def_property_readonly("uses", &Kernel::uses)
      .def_property_readonly("function", &Kernel::function);
  py::class_<Running>(module, "Region", "An op of the program's own, until `end`.")
      .def("end", &Running::end);
  module.def("begin_region", &begin_region, py::arg("name"), py::arg("written"), py::arg("read"));
}

}  // namespace umem::torch_ext
