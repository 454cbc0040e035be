#include <pybind11/stl.h>

#include "base/options.h"
#include "bindings/bind.h"
#include "policy/planned.h"

namespace py = pybind11;

namespace umem::bindings {

void bind_options(py::module_& module) {
  py::class_<Options>(module, "Options", "The options of the native side at start.")
      .def(py::init<>())
      .def_readwrite("device", &Options::device)
      .def_readwrite("profile", &Options::profile)
      .def_readwrite("device_bytes", &Options::device_bytes)
      .def_readwrite("budget_bytes", &Options::budget_bytes)
      .def_readwrite("budget_percent", &Options::budget_percent)
      .def_readwrite("host_budget_bytes", &Options::host_budget_bytes)
      .def_readwrite("min_swap_bytes", &Options::min_swap_bytes)
      .def_readwrite("floor_bytes", &Options::floor_bytes)
      .def_readwrite("piece_bytes", &Options::piece_bytes)
      .def_readwrite("policy", &Options::policy)
      .def_readwrite("backing", &Options::backing)
      .def_readwrite("guard", &Options::guard)
      .def_readwrite("watchdog_s", &Options::watchdog_s)
      .def_readwrite("backed", &Options::backed)
      .def_readwrite("disk", &Options::disk)
      .def_readwrite("disk_bytes", &Options::disk_bytes)
      .def_readwrite("staging_bytes", &Options::staging_bytes)
      .def_readwrite("disk_bytes_a_day", &Options::disk_bytes_a_day)
      .def_readwrite("link_in_bytes_per_us", &Options::link_in_bytes_per_us)
      .def_readwrite("link_out_bytes_per_us", &Options::link_out_bytes_per_us)
      .def_readwrite("fault_us", &Options::fault_us)
      .def("__eq__", [](const Options& a, const Options& b) { return a == b; });
  module.def("headroom_bytes", &headroom_bytes);
  module.attr("MAX_PLANS") = policy::Planned::kMaxPlans;
}

}  // namespace umem::bindings
