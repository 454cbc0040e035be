#include "driver/loader.h"

#include <dlfcn.h>

namespace umem::driver {
namespace {

// cuGetProcAddress_v2(name, &function, CUDA version, flags, &status)
using GetProcAddress = CUresult (*)(const char*, void**, int, std::uint64_t, int*);

CudaDevice describe(const Table& table, CUdevice device) {
  CudaDevice result;
  char name[256] = "";
  if (table.cuDeviceGetName(name, sizeof name, device) == CUDA_SUCCESS) result.name = name;
  table.cuDeviceTotalMem(&result.total_bytes, device);
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    table.cuDeviceGetAttribute(&value, which, device);
    return value;
  };
  result.major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  result.minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  result.managed_memory = attribute(CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY) != 0;
  result.concurrent_managed_access = attribute(CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS) != 0;
  result.pageable_memory_access = attribute(CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS) != 0;
  return result;
}

}  // namespace

Status open_cuda(Driver& driver) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!library) return {Code::kNotSupported, "there is no NVIDIA driver (libcuda.so.1)"};
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (!get) return {Code::kNotSupported, "the NVIDIA driver is older than CUDA 12.0; update it"};
  driver = {Kind::kCuda, {}, nullptr, nullptr, nullptr};
  const auto find = [&](const char* name, int version) {
    void* function = nullptr;
    int status = 0;
    return get(name, &function, version, 0, &status) == CUDA_SUCCESS ? function : nullptr;
  };
#define UMEM_SYMBOL(name, version, params) \
  driver.table.name = reinterpret_cast<CUresult(*) params>(find(#name, version));
#include "driver/symbols.def"
#undef UMEM_SYMBOL
  fill_missing(driver.table);
  return {};
}

CudaProbe probe_cuda() {
  CudaProbe probe;
  Driver driver;
  if (Status status = open_cuda(driver); !status.ok()) {
    probe.reason = status.message();
    return probe;
  }
  const Table& table = driver.table;
  if (Status status = check(table.cuInit(0), Entry::cuInit); !status.ok()) {
    probe.reason = status.message();
    return probe;
  }
  table.cuDriverGetVersion(&probe.driver_version);
  int count = 0;
  table.cuDeviceGetCount(&count);
  bool usable = count > 0;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device = 0;
    if (table.cuDeviceGet(&device, ordinal) != CUDA_SUCCESS) continue;
    probe.devices.push_back(describe(table, device));
    usable = usable && probe.devices.back().concurrent_managed_access;
  }
  probe.available = usable;
  if (count == 0) probe.reason = "the NVIDIA driver sees no device";
  if (count > 0 && !usable)
    probe.reason = "a device lacks concurrentManagedAccess (WSL, some vGPU): no oversubscription";
  return probe;
}

}  // namespace umem::driver
