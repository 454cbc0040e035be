// The runtime's state, block by block, and changes that no session makes.
#include <string>

#include "bindings/bind.h"
#include "core_testing/testing.h"
#include "runtime/awaited.h"
#include "runtime/hints.h"
#include "runtime/runtime.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

py::list blocks() {
  py::list result;
  for (const runtime::BlockReport& report : unlocked(&runtime::blocks)) {
    py::dict made;
    made["base"] = report.base;
    made["bytes"] = report.bytes;
    made["tag"] = report.tag;
    made["family"] = report.family;
    made["state"] = report.state;
    made["pins"] = report.pins;
    result.append(made);
  }
  return result;
}

}  // namespace

void bind_inside(py::module_& module) {
  module.def("blocks", &blocks);
  module.def("awaits", &runtime::awaiting);
  module.def("set_policy",
             [](const std::string& name) { run([&] { return runtime::set_policy(name); }); });
}

}  // namespace umem::bindings
