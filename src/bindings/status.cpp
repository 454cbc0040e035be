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

residency::Tag tag_of(const std::string& name) {
  const residency::Tag tag = residency::find_tag(name);
  if (tag == residency::Tag::kCount)
    raise_if_error(Status(Code::kInvalidArgument, "unknown tag '" + name + "'"));
  return tag;
}

void raise_if_error(const Status& status) {
  if (status.ok()) return;
  const py::object type = py::module_::import("umem.errors").attr(exception_of(status.code()));
  PyErr_SetString(type.ptr(), status.message().c_str());
  throw py::error_already_set();
}

}  // namespace umem::bindings
