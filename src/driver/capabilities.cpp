#include "driver/capabilities.h"

#include <algorithm>
#include <iterator>

#include "driver/loader.h"

namespace umem::driver {
namespace {

// Without these umem cannot run; all others have a substitute or only inform.
constexpr Entry kRequired[] = {
    Entry::cuDevicePrimaryCtxRetain,
    Entry::cuCtxGetCurrent,
    Entry::cuCtxSetCurrent,
    Entry::cuMemGetInfo,
    Entry::cuMemAlloc,
    Entry::cuMemAllocManaged,
    Entry::cuMemFree,
    Entry::cuMemPrefetchAsync,
    Entry::cuStreamCreate,
    Entry::cuStreamWaitEvent,
    Entry::cuStreamIsCapturing,
    Entry::cuEventCreate,
    Entry::cuEventDestroy,
    Entry::cuEventRecord,
    Entry::cuEventQuery,
    Entry::cuEventSynchronize,
};

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// False also for an attribute that this driver does not know.
Status read_flag(const Table& table, CUdevice device, CUdevice_attribute attribute, bool& flag) {
  int value = 0;
  const CUresult result = table.cuDeviceGetAttribute(&value, attribute, device);
  flag = result == CUDA_SUCCESS && value != 0;
  return result == CUDA_ERROR_INVALID_VALUE ? Status() : check(result, Entry::cuDeviceGetAttribute);
}

Status read_number(const Table& table, CUdevice device, CUdevice_attribute attribute, int& value) {
  return check(table.cuDeviceGetAttribute(&value, attribute, device), Entry::cuDeviceGetAttribute);
}

Status read_identity(const Table& table, CUdevice device, DeviceCapabilities& d) {
  char text[256] = "";
  UMEM_RETURN_IF_ERROR(
      check(table.cuDeviceGetName(text, sizeof text, device), Entry::cuDeviceGetName));
  d.name = text;
  // Only for the speed of the link, which doctor shows: not worth a failure.
  if (table.cuDeviceGetPCIBusId(text, sizeof text, device) == CUDA_SUCCESS) d.pci_bus_id = text;
  UMEM_RETURN_IF_ERROR(
      check(table.cuDeviceTotalMem(&d.total_bytes, device), Entry::cuDeviceTotalMem));
  UMEM_RETURN_IF_ERROR(
      read_number(table, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, d.major));
  return read_number(table, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, d.minor);
}

Status read_flags(const Table& table, CUdevice device, DeviceCapabilities& d) {
  const auto read = [&](CUdevice_attribute attribute, bool& flag) {
    return read_flag(table, device, attribute, flag);
  };
  // Every driver with the entry points knows the attributes that umem depends on: a missing answer
  // is an error, not a device without the attribute.
  int managed = 0, concurrent = 0;
  UMEM_RETURN_IF_ERROR(read_number(table, device, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, managed));
  UMEM_RETURN_IF_ERROR(
      read_number(table, device, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, concurrent));
  d.managed_memory = managed != 0;
  d.concurrent_managed_access = concurrent != 0;
  UMEM_RETURN_IF_ERROR(read(CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, d.pageable_memory_access));
  UMEM_RETURN_IF_ERROR(read(CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
                            d.pageable_uses_host_page_tables));
  return read(CU_DEVICE_ATTRIBUTE_INTEGRATED, d.integrated);
}

Status read_devices(const Table& table, std::vector<DeviceCapabilities>& devices) {
  int count = 0;
  UMEM_RETURN_IF_ERROR(check(table.cuDeviceGetCount(&count), Entry::cuDeviceGetCount));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device = 0;
    UMEM_RETURN_IF_ERROR(check(table.cuDeviceGet(&device, ordinal), Entry::cuDeviceGet));
    DeviceCapabilities row;
    UMEM_RETURN_IF_ERROR(read_identity(table, device, row));
    UMEM_RETURN_IF_ERROR(read_flags(table, device, row));
    devices.push_back(std::move(row));
  }
  return {};
}

void read_entries(const Driver& driver, Capabilities& c) {
  const Table& table = driver.table;
  c.has_batch_prefetch = supports(table, Entry::cuMemPrefetchBatchAsync);
  c.has_discard = supports(table, Entry::cuMemDiscardBatchAsync);
  c.has_discard_and_prefetch = supports(table, Entry::cuMemDiscardAndPrefetchBatchAsync);
  // Not in the table: umem keeps its own ledger and does not call it.
  c.has_location_info =
      driver.kind == Kind::kCuda && libcuda_exports("cuMemGetLocationInfo", 13040);
  const auto missing = std::find_if(std::begin(kRequired), std::end(kRequired),
                                    [&](Entry entry) { return !supports(table, entry); });
  c.missing = missing == std::end(kRequired) ? Entry::kCount : *missing;
}

std::string no_concurrent_access(const Capabilities& c) {
  std::string names;
  for (std::size_t i = 0; i < c.devices.size(); ++i) {
    if (c.devices[i].concurrent_managed_access) continue;
    names += (names.empty() ? "" : ", ") + std::to_string(i) + " (" + c.devices[i].name + ")";
  }
  return "no concurrentManagedAccess on device " + names +
         ", so managed memory cannot exceed device memory (as under WSL and on some vGPU)";
}

}  // namespace

int nearest_host_node(const Table& table, int ordinal) {
  CUdevice device = 0;
  int node = -1;
  if (table.cuDeviceGet(&device, ordinal) != CUDA_SUCCESS) return -1;
  const CUresult result =
      table.cuDeviceGetAttribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device);
  return result == CUDA_SUCCESS ? node : -1;
}

Status read_capabilities(const Driver& driver, Capabilities& capabilities) {
  capabilities = {};
  const Table& table = driver.table;
  read_entries(driver, capabilities);
  UMEM_RETURN_IF_ERROR(check(table.cuDriverGetVersion(&capabilities.driver_version),
                             Entry::cuDriverGetVersion));  // which may come before cuInit
  const CUresult initialised = table.cuInit(0);
  if (initialised != CUDA_ERROR_NO_DEVICE) {
    UMEM_RETURN_IF_ERROR(check(initialised, Entry::cuInit));
    UMEM_RETURN_IF_ERROR(read_devices(table, capabilities.devices));
  }
  const auto& devices = capabilities.devices;
  if (devices.empty()) return {Code::kNotSupported, "the NVIDIA driver sees no device"};
  capabilities.concurrent_managed_access =
      std::all_of(devices.begin(), devices.end(),
                  [](const DeviceCapabilities& d) { return d.concurrent_managed_access; });
  capabilities.integrated = std::all_of(devices.begin(), devices.end(),
                                        [](const DeviceCapabilities& d) { return d.integrated; });
  return {};
}

std::string managed_memory_problem(const Capabilities& capabilities) {
  // Looked at first, because another driver would not help.
  if (capabilities.integrated)
    return "host and device share one memory, so eviction would free nothing";
  if (capabilities.missing != Entry::kCount) {
    const Symbol& lacking = symbol(capabilities.missing);
    return "the NVIDIA driver (for CUDA " + version_text(capabilities.driver_version) + ") lacks " +
           lacking.name + " of CUDA " + version_text(lacking.version) + "; update the driver";
  }
  if (capabilities.devices.empty()) return "the NVIDIA driver sees no device";
  return capabilities.concurrent_managed_access ? "" : no_concurrent_access(capabilities);
}

CudaProbe probe_cuda() {
  CudaProbe probe;
  Driver driver;
  Status status = open_cuda(driver);
  if (status.ok()) status = read_capabilities(driver, probe.capabilities);
  probe.reason = status.ok() ? managed_memory_problem(probe.capabilities) : status.message();
  probe.available = probe.reason.empty();
  return probe;
}

}  // namespace umem::driver
