// The capabilities of an open driver and its devices, read once and without a context.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "base/export.h"
#include "base/status.h"
#include "driver/table.h"

namespace umem::driver {

struct DeviceCapabilities {
  std::string name;
  std::string pci_bus_id;  // as 0000:3b:00.0; empty if the driver does not report it
  std::size_t total_bytes = 0;
  int major = 0, minor = 0;  // compute capability
  bool managed_memory = false;
  bool concurrent_managed_access = false;
  bool pageable_memory_access = false;          // HMM or ATS: kernels can use malloc'ed memory
  bool pageable_uses_host_page_tables = false;  // ATS: by the host's own page tables
  bool integrated = false;                      // device memory is the host's
};

struct Capabilities {
  int driver_version = 0;  // 13000 is CUDA 13.0
  std::vector<DeviceCapabilities> devices;
  bool concurrent_managed_access = false;  // on all devices, as the batch calls require
  bool integrated = false;                 // all devices: eviction would free nothing
  bool has_batch_prefetch = false;
  bool has_discard = false;
  bool has_discard_and_prefetch = false;
  bool has_location_info = false;  // cuMemGetLocationInfo: the location of a range's bytes
  Entry missing = Entry::kCount;   // an entry point that umem cannot do without; kCount: none
};

// Initialises the driver (cuInit) and queries it. kNotSupported without a device. Values read
// before a failure remain in `capabilities`.
Status read_capabilities(const Driver& driver, Capabilities& capabilities);

// The NUMA node of the host that is nearest to the device of that ordinal; -1 where the driver
// knows none.
int nearest_host_node(const Table& table, int ordinal);

// The reason why plain device memory is used instead of managed memory; empty if it is not.
std::string managed_memory_problem(const Capabilities& capabilities);

struct CudaProbe {
  bool available = false;  // umem can use the devices
  std::string reason;      // why not
  Capabilities capabilities;
};
// Probes the real driver without creating a context.
UMEM_API CudaProbe probe_cuda();

}  // namespace umem::driver
