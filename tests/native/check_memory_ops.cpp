// The destination of bytes on the host: the node nearest to the device, or the driver's choice.
#include <cstddef>
#include <vector>

#include "driver/capabilities.h"
#include "driver/table.h"
#include "expect.h"
#include "managed/memory_ops.h"

namespace {

using namespace umem;      // NOLINT: a test program
using namespace umem::cu;  // NOLINT

constexpr int kNode = 3;
CUresult g_answer = CUDA_SUCCESS;  // of the driver to the node as a location
CUmemLocation g_last{};            // in the last prefetch
int g_calls = 0;

CUresult prefetch(CUmemLocation to) {
  ++g_calls;
  g_last = to;
  const bool node = to.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
  return node ? g_answer : CUDA_SUCCESS;
}

driver::Table table(bool batched) {
  driver::Table table;
  table.cuDeviceGet = [](CUdevice* device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
  };
  table.cuDeviceGetAttribute = [](int* value, CUdevice_attribute which, CUdevice device) {
    if (which != CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID || device == 1) return CUDA_ERROR_INVALID_VALUE;
    *value = kNode;
    return CUDA_SUCCESS;
  };
  table.cuMemPrefetchAsync = [](CUdeviceptr, std::size_t, CUmemLocation to, unsigned, CUstream) {
    return prefetch(to);
  };
  if (batched)
    table.cuMemPrefetchBatchAsync = [](CUdeviceptr*, std::size_t*, std::size_t, CUmemLocation* to,
                                       std::size_t*, std::size_t, unsigned long long,
                                       CUstream) { return prefetch(*to); };
  else
    table.cuMemPrefetchBatchAsync = [](CUdeviceptr*, std::size_t*, std::size_t, CUmemLocation*,
                                       std::size_t*, std::size_t, unsigned long long,
                                       CUstream) { return CUDA_ERROR_NOT_FOUND; };
  return table;
}

bool is(CUmemLocationType type, int id) {
  return g_last.type == type && g_last.id == id;
}

void check(bool batched, CUresult refusal) {
  const driver::Table entries = table(batched);
  managed::MemoryOps ops(entries, 0);
  const std::vector<managed::MemSpan> spans{{2 * MiB, 2 * MiB}};
  EXPECT(ops.prefetch(spans, managed::Where::kHost, nullptr).ok());
  EXPECT(is(CU_MEM_LOCATION_TYPE_HOST, 0));
  ops.set_host_node(driver::nearest_host_node(entries, 0));
  EXPECT(ops.prefetch(spans, managed::Where::kHost, nullptr).ok());
  EXPECT(is(CU_MEM_LOCATION_TYPE_HOST_NUMA, kNode));
  EXPECT(ops.prefetch(spans, managed::Where::kDevice, nullptr).ok());
  EXPECT(is(CU_MEM_LOCATION_TYPE_DEVICE, 0));
  // The node is not requested again from a driver that refuses it.
  g_answer = refusal;
  g_calls = 0;
  for (int i = 0; i < 2; ++i) EXPECT(ops.prefetch(spans, managed::Where::kHost, nullptr).ok());
  EXPECT(g_calls == 3 && is(CU_MEM_LOCATION_TYPE_HOST, 0));
  g_answer = CUDA_SUCCESS;
}

}  // namespace

int main() {
  for (CUresult refusal :
       {CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_NOT_PERMITTED}) {
    check(true, refusal);
    check(false, refusal);
  }
  EXPECT(driver::nearest_host_node(table(true), 1) == -1);
  return g_wrong == 0 ? 0 : 1;
}
