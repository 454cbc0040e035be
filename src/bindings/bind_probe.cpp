#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "driver/capabilities.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

py::dict device_dict(const driver::DeviceCapabilities& device) {
  py::dict row;
  row["name"] = device.name;
  row["pci_bus_id"] = device.pci_bus_id;
  row["total_bytes"] = device.total_bytes;
  row["compute_capability"] = std::to_string(device.major) + "." + std::to_string(device.minor);
  row["managed_memory"] = device.managed_memory;
  row["concurrent_managed_access"] = device.concurrent_managed_access;
  row["pageable_memory_access"] = device.pageable_memory_access;
  row["pageable_uses_host_page_tables"] = device.pageable_uses_host_page_tables;
  row["integrated"] = device.integrated;
  return row;
}

py::dict probe_dict() {
  const driver::CudaProbe probe = driver::probe_cuda();
  const driver::Capabilities& capabilities = probe.capabilities;
  py::list devices;
  for (const driver::DeviceCapabilities& device : capabilities.devices)
    devices.append(device_dict(device));
  py::dict result;
  result["available"] = probe.available;
  result["reason"] = probe.reason;
  result["driver_version"] = capabilities.driver_version;
  result["concurrent_managed_access"] = capabilities.concurrent_managed_access;
  result["batch_prefetch"] = capabilities.has_batch_prefetch;
  result["discard"] = capabilities.has_discard;
  result["discard_and_prefetch"] = capabilities.has_discard_and_prefetch;
  result["location_info"] = capabilities.has_location_info;
  result["devices"] = devices;
  return result;
}

}  // namespace

void bind_probe(py::module_& module) {
  module.def("probe_cuda", &probe_dict);
}

}  // namespace umem::bindings
