// umem's conclusions from a driver's table: the existing entry points, and missing features.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver/capabilities.h"

namespace {

using namespace umem;          // NOLINT
using namespace umem::driver;  // NOLINT

int g_devices = 2;
int g_without = -1;    // the device without concurrentManagedAccess
int g_integrated = 0;  // so many devices, from the first, use the host's memory

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

CUresult attribute(int* value, CUdevice_attribute which, CUdevice device) {
  if (which == CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS) return CUDA_ERROR_INVALID_VALUE;
  if (which == CU_DEVICE_ATTRIBUTE_INTEGRATED) {
    *value = device < g_integrated;
    return CUDA_SUCCESS;
  }
  *value = which == CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS && device == g_without ? 0 : 1;
  return CUDA_SUCCESS;
}

// Every entry point exists and returns success, except the ones that describe devices.
template <class... Params>
CUresult succeed(Params...) {
  return CUDA_SUCCESS;
}
template <class... Params>
void fill(CUresult (*&slot)(Params...)) {
  slot = succeed<Params...>;
}

Driver fake() {
  Driver driver;
#define UMEM_SYMBOL(name, version, params) fill(driver.table.name);
#include "driver/symbols.def"
#undef UMEM_SYMBOL
  driver.table.cuDriverGetVersion = [](int* version) {
    *version = 12080;
    return CUDA_SUCCESS;
  };
  driver.table.cuDeviceGetCount = [](int* count) {
    *count = g_devices;
    return CUDA_SUCCESS;
  };
  driver.table.cuDeviceGet = [](CUdevice* device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
  };
  driver.table.cuDeviceGetName = [](char* name, int, CUdevice device) {
    std::strcpy(name, device == 0 ? "first" : "second");
    return CUDA_SUCCESS;
  };
  driver.table.cuDeviceGetAttribute = attribute;
  return driver;
}

Capabilities read(const Driver& driver) {
  Capabilities found;
  expect(read_capabilities(driver, found).ok(), "read_capabilities");
  return found;
}

void an_entry_point_is_present_or_missing() {
  Driver driver = fake();
  driver.table.cuMemDiscardBatchAsync = nullptr;
  expect(!supports(driver.table, Entry::cuMemDiscardBatchAsync), "a null slot is missing");
  fill_missing(driver.table);
  expect(!supports(driver.table, Entry::cuMemDiscardBatchAsync), "missing");
  expect(supports(driver.table, Entry::cuMemPrefetchBatchAsync), "present");
  const Capabilities found = read(driver);
  expect(found.has_batch_prefetch && !found.has_discard, "as the table has them");
  expect(!supports(driver.table, Entry::kCount), "no entry point");
}

void a_needed_entry_point_that_lacks_is_the_problem() {
  Driver driver = fake();
  driver.table.cuMemPrefetchAsync = nullptr;
  fill_missing(driver.table);
  const std::string problem = managed_memory_problem(read(driver));
  expect(problem.find("(for CUDA 12.8) lacks cuMemPrefetchAsync of CUDA 12.2") != problem.npos,
         "names the entry point and both versions");
}

void all_devices_need_concurrent_access() {
  const Driver driver = fake();
  expect(managed_memory_problem(read(driver)).empty(), "no problem");
  g_without = 1;
  const Capabilities found = read(driver);
  expect(found.devices[0].concurrent_managed_access, "of the first");
  expect(!found.concurrent_managed_access, "not of all");
  const std::string problem = managed_memory_problem(found);
  expect(problem.find("on device 1 (second)") != problem.npos, "names the device");
  g_without = -1;
}

void a_device_with_memory_of_its_own_keeps_managed_memory() {
  const Driver driver = fake();
  g_integrated = 1;
  const Capabilities found = read(driver);
  expect(found.devices[0].integrated && !found.devices[1].integrated, "the first only");
  expect(managed_memory_problem(found).empty(), "not all");
  g_integrated = 2;
  const std::string problem = managed_memory_problem(read(driver));
  expect(problem.find("host and device share one memory") != problem.npos, "all");
  g_integrated = 0;
}

void an_unknown_attribute_is_absent_and_no_device_an_error() {
  const Driver driver = fake();
  const Capabilities found = read(driver);
  expect(!found.devices[0].pageable_memory_access && found.devices[0].managed_memory, "attributes");
  g_devices = 0;
  Capabilities none;
  expect(read_capabilities(driver, none).code() == Code::kNotSupported, "no device");
  expect(!managed_memory_problem(none).empty(), "no device is a problem");
  g_devices = 2;
}

}  // namespace

int main() {
  an_entry_point_is_present_or_missing();
  a_needed_entry_point_that_lacks_is_the_problem();
  all_devices_need_concurrent_access();
  a_device_with_memory_of_its_own_keeps_managed_memory();
  an_unknown_attribute_is_absent_and_no_device_an_error();
  std::puts("ok");
  return 0;
}
