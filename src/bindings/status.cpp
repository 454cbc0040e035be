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
    case Code::kOff:
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
