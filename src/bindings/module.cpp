#include <string>

#include "bindings/bind.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

const char* exception_of(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return "ConfigError";
    case Code::kOutOfDeviceMemory:
    case Code::kOutOfHostMemory:
      return "OutOfMemoryError";
    case Code::kNotSupported:
      return "NotSupportedError";
    case Code::kBadState:
      return "StateError";
    case Code::kOk:
    case Code::kDriver:
      break;
  }
  return "DriverError";
}

}  // namespace

void raise_if_error(const Status& status) {
  if (status.ok()) return;
  const py::object type = py::module_::import("umem.errors").attr(exception_of(status.code()));
  PyErr_SetString(type.ptr(), status.message().c_str());
  throw py::error_already_set();
}

}  // namespace umem::bindings

PYBIND11_MODULE(_core, module) {
  module.doc() = "umem's native core.";
  module.attr("__version__") = UMEM_VERSION;
  umem::bindings::bind_options(module);
  umem::bindings::bind_runtime(module);
  umem::bindings::bind_memory(module);
  umem::bindings::bind_hints(module);
  umem::bindings::bind_driver(module);
  umem::bindings::bind_bench(module);
  umem::bindings::bind_trace(module);
  umem::bindings::bind_victim_callback(module);
  umem::bindings::bind_awaited(module);
  umem::bindings::bind_interrupts(module);
  umem::bindings::bind_plan(module);
  umem::bindings::bind_layout(module);
  umem::bindings::bind_planner(module);
  umem::bindings::bind_probe(module);
  umem::bindings::bind_replay(module);
  umem::bindings::bind_sleep(module);
  umem::bindings::bind_transfer_log(module);
}
