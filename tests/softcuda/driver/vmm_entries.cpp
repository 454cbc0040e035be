// Entry points of virtual memory management. None of them waits for enqueued work.
#include "entry.h"
#include "vmm.h"
#include "work.h"

using namespace softcuda;  // NOLINT

ENTRY(cuMemGetAllocationGranularity, 10020,
      (std::size_t* granularity, const MemoryProperties* properties, int option)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_initialized());
  if (!granularity || option < 0 || option > 1) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_properties(properties));
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}
ENTRY(cuMemAddressReserve, 10020,
      (CUdeviceptr * ptr, std::size_t bytes, std::size_t alignment, CUdeviceptr hint,
       unsigned long long flags)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_initialized());
  if (!ptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  std::uintptr_t at = 0;
  RETURN_IF_FAILED(reserve_addresses(at, bytes, alignment, hint));
  *ptr = at;
  return CUDA_SUCCESS;
}
ENTRY(cuMemAddressFree, 10020, (CUdeviceptr ptr, std::size_t bytes)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_initialized());
  const auto lock = lock_work();
  RETURN_IF_FAILED(free_addresses(ptr, bytes));
  races().allocated(ptr, bytes);  // the next owner of the addresses has no history
  return CUDA_SUCCESS;
}
ENTRY(cuMemCreate, 10020,
      (unsigned long long* handle, std::size_t bytes, const MemoryProperties* properties,
       unsigned long long flags)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_initialized());
  if (!handle || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_properties(properties));
  std::uint64_t created = 0;
  RETURN_IF_FAILED(create_memory(created, bytes, *properties));
  *handle = created;
  return CUDA_SUCCESS;
}
ENTRY(cuMemRelease, 10020, (unsigned long long handle)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_initialized());
  return release_memory(handle);
}
ENTRY(cuMemMap, 10020,
      (CUdeviceptr ptr, std::size_t bytes, std::size_t offset, unsigned long long handle,
       unsigned long long flags)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_initialized());
  if (offset != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const auto lock = lock_work();
  RETURN_IF_FAILED(map_memory(ptr, bytes, handle));
  races().allocated(ptr, bytes);
  return CUDA_SUCCESS;
}
ENTRY(cuMemUnmap, 10020, (CUdeviceptr ptr, std::size_t bytes)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_initialized());
  const auto lock = lock_work();
  if (!covers_mappings(ptr, bytes)) return CUDA_ERROR_INVALID_VALUE;
  see_flags();
  races().done_by_host({ptr, ptr + bytes, Use::kFree, "cuMemUnmap"});
  return unmap_memory(ptr, bytes);
}
ENTRY(cuMemSetAccess, 10020,
      (CUdeviceptr ptr, std::size_t bytes, const AccessGrant* grants, std::size_t count)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_initialized());
  const auto lock = lock_work();
  return grant_access(ptr, bytes, grants, count);
}
