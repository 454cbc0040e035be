#include <pybind11/stl.h>

#include <optional>

#include "bindings/bind.h"
#include "policy/registry.h"
#include "runtime/reports.h"
#include "runtime/runtime.h"
#include "runtime/steps.h"
#include "soft/device.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

py::dict stats_dict(std::optional<int> device) {
  const runtime::Stats stats = value_of(unlocked([&]() -> Result<runtime::Stats> {
    if (device) return runtime::device_stats(*device);
    return runtime::stats();
  }));
  py::dict result;
#define UMEM_STAT(name, doc) result[#name] = stats.name;
#include "runtime/stats.def"
#undef UMEM_STAT
  return result;
}

py::dict stats_docs() {
  py::dict result;
#define UMEM_STAT(name, doc) result[#name] = doc;
#include "runtime/stats.def"
#undef UMEM_STAT
  return result;
}

py::list profiles() {
  py::list result;
  for (const soft::Profile& profile : soft::profiles()) {
    py::dict row;
    row["name"] = profile.name;
    row["gb_per_s_in"] = profile.bytes_per_us_in / 1e3;
    row["gb_per_s_out"] = profile.bytes_per_us_out / 1e3;
    row["fault_us"] = profile.fault_us;
    row["memory_bytes"] = profile.memory_bytes;
    row["source"] = profile.source;
    result.append(row);
  }
  return result;
}

}  // namespace

void bind_runtime(py::module_& module) {
  module.def("start", [](const Options& options) { run([&] { return runtime::start(options); }); });
  module.def("stop", [] { run([] { return runtime::stop(); }); });
  module.def("running", &runtime::running);
  module.def("current_options", [] { return unlocked(&runtime::current_options); });
  module.def("set_budget", [](std::size_t device_bytes, std::size_t host_bytes) {
    run([&] { return runtime::set_budget(device_bytes, host_bytes); });
  });
  module.def("policies", [] {
    return std::vector<std::string>(policy::names().begin(), policy::names().end());
  });
  module.def("profiles", &profiles);
  module.def("stats", &stats_dict, py::arg("device") = py::none());
  module.def("opened_devices", &runtime::opened_devices);
  module.def("stats_docs", &stats_docs);
  module.def("faults_by_operator", [] { return unlocked(&runtime::faults_by_operator); });
  module.def("reset_peak_stats", [] {
    const Unlocked unlocked;
    runtime::reset_peak_stats();
  });
  module.def("trim", [] { run([] { return runtime::trim(); }); });
  module.def("steps", &runtime::steps);
  module.def("step", [] {
    const Unlocked unlocked;
    runtime::step();
  });
  module.def("guess_step", [] {
    const Unlocked unlocked;
    runtime::guess_step();
  });
}

}  // namespace umem::bindings
