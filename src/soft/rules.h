// The documented rules of the managed-memory calls' arguments, independent of a device's state, for
// all software drivers.
#pragma once
#include <cstddef>
#include <cstdint>

#include "driver/types.h"

namespace umem::soft {

// [ptr, ptr + bytes) is inside [base, base + owned), without wrapping around.
inline bool inside(std::uintptr_t ptr, std::size_t bytes, std::uintptr_t base, std::size_t owned) {
  return ptr >= base && bytes <= owned && ptr - base <= owned - bytes;
}

// Device locations are numbered 0 to devices - 1.
inline bool valid_location(const cu::CUmemLocation& location, int devices) {
  switch (location.type) {
    case cu::CU_MEM_LOCATION_TYPE_DEVICE:
      return location.id >= 0 && location.id < devices;
    case cu::CU_MEM_LOCATION_TYPE_HOST:
    case cu::CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
      return true;
    case cu::CU_MEM_LOCATION_TYPE_HOST_NUMA:
      return location.id >= 0;
    case cu::CU_MEM_LOCATION_TYPE_INVALID:
      break;
  }
  return false;
}

// The checks of all batch calls before any work. The legacy stream is refused; the device checks
// that the stream exists and the ranges are managed memory.
inline cu::CUresult check_batch(const cu::CUdeviceptr* ptrs, const std::size_t* sizes,
                                std::size_t count, unsigned long long flags, cu::CUstream stream) {
  const bool refused =
      !ptrs || !sizes || count == 0 || flags != 0 || !stream || stream == cu::legacy_stream();
  return refused ? cu::CUDA_ERROR_INVALID_VALUE : cu::CUDA_SUCCESS;
}

// The destinations of a batch's ranges: location k applies to range first_of[k] and later.
struct Destinations {
  const cu::CUmemLocation* locations = nullptr;
  const std::size_t* first_of = nullptr;
  std::size_t count = 0;

  cu::CUresult check(std::size_t ranges, int devices) const {
    if (!locations || !first_of || count == 0 || count > ranges || first_of[0] != 0)
      return cu::CUDA_ERROR_INVALID_VALUE;
    for (std::size_t k = 0; k < count; ++k) {
      const bool increasing = k == 0 || first_of[k] > first_of[k - 1];
      if (!increasing || first_of[k] >= ranges || !valid_location(locations[k], devices))
        return cu::CUDA_ERROR_INVALID_VALUE;
    }
    return cu::CUDA_SUCCESS;
  }

  const cu::CUmemLocation& of(std::size_t range) const {
    std::size_t k = 0;
    while (k + 1 < count && first_of[k + 1] <= range) ++k;
    return locations[k];
  }
};

}  // namespace umem::soft
