#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "driver/loader.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

py::dict probe_dict() {
  const driver::CudaProbe probe = driver::probe_cuda();
  py::list devices;
  for (const driver::CudaDevice& device : probe.devices) {
    py::dict row;
    row["name"] = device.name;
    row["total_bytes"] = device.total_bytes;
    row["compute_capability"] = std::to_string(device.major) + "." + std::to_string(device.minor);
    row["managed_memory"] = device.managed_memory;
    row["concurrent_managed_access"] = device.concurrent_managed_access;
    row["pageable_memory_access"] = device.pageable_memory_access;
    devices.append(row);
  }
  py::dict result;
  result["available"] = probe.available;
  result["reason"] = probe.reason;
  result["driver_version"] = probe.driver_version;
  result["devices"] = devices;
  return result;
}

}  // namespace

void bind_probe(py::module_& module) {
  module.def("probe_cuda", &probe_dict);
}

}  // namespace umem::bindings
