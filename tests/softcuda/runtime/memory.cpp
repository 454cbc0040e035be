// Memory: allocation, copies, fills, pools, attributes.
#include <array>
#include <map>
#include <mutex>

#include "common.h"

using softcudart::address;
using softcudart::finish;

namespace {

// A pool is its attributes; its memory is ordinary device memory.
struct Pool {
  int device = 0;
  std::map<int, std::uint64_t> attributes;
};
std::mutex g_pools_mutex;
Pool& pool_of(int device) {
  static std::array<Pool, 8> pools;
  pools[static_cast<std::size_t>(device)].device = device;
  return pools[static_cast<std::size_t>(device)];
}

bool is_word(cudaMemPoolAttr attribute) {
  return attribute <= cudaMemPoolReuseAllowInternalDependencies;
}

int allocate(void** ptr, std::size_t bytes) {
  if (!ptr) return cudaErrorInvalidValue;
  *ptr = nullptr;
  if (bytes == 0) return 0;
  std::uint64_t at = 0;
  if (const int error = cuMemAlloc_v2(&at, bytes)) return error;
  *ptr = reinterpret_cast<void*>(at);
  return 0;
}

// The direction must fit the pointers, as far as they are known.
bool direction_fits(const void* to, const void* from, cudaMemcpyKind kind) {
  bool managed = false;
  const bool to_device = softcuda_is_device_pointer(to, &managed);
  const bool to_host_too = !to_device || managed;
  managed = false;
  const bool from_device = softcuda_is_device_pointer(from, &managed);
  const bool from_host_too = !from_device || managed;
  switch (kind) {
    case cudaMemcpyHostToHost:
      return to_host_too && from_host_too;
    case cudaMemcpyHostToDevice:
      return to_device && from_host_too;
    case cudaMemcpyDeviceToHost:
      return to_host_too && from_device;
    case cudaMemcpyDeviceToDevice:
      return to_device && from_device;
    default:
      return true;
  }
}

}  // namespace

RUNTIME_API cudaMalloc(void** ptr, std::size_t bytes) {
  RUNTIME_ENTER();
  return finish(allocate(ptr, bytes));
}
RUNTIME_API cudaMallocManaged(void** ptr, std::size_t bytes, unsigned flags) {
  RUNTIME_ENTER();
  std::uint64_t at = 0;
  const int error = cuMemAllocManaged(&at, bytes, flags);
  if (!error) *ptr = reinterpret_cast<void*>(at);
  return finish(error);
}
RUNTIME_API cudaFree(void* ptr) {
  RUNTIME_ENTER();
  return finish(cuMemFree_v2(address(ptr)));
}
RUNTIME_API cudaMallocAsync(void** ptr, std::size_t bytes, cudaStream_t) {
  RUNTIME_ENTER();
  return finish(allocate(ptr, bytes));
}
RUNTIME_API cudaFreeAsync(void* ptr, cudaStream_t stream) {
  RUNTIME_ENTER();
  return finish(ptr ? softcuda_free_async(ptr, stream) : 0);
}
RUNTIME_API cudaHostAlloc(void** ptr, std::size_t bytes, unsigned flags) {
  RUNTIME_ENTER();
  return finish(cuMemHostAlloc(ptr, bytes, flags));
}
RUNTIME_API cudaMallocHost(void** ptr, std::size_t bytes) {
  RUNTIME_ENTER();
  return finish(cuMemHostAlloc(ptr, bytes, 0));
}
RUNTIME_API cudaFreeHost(void* ptr) {
  RUNTIME_ENTER();
  return finish(cuMemFreeHost(ptr));
}
RUNTIME_API cudaHostRegister(void* ptr, std::size_t bytes, unsigned flags) {
  RUNTIME_ENTER();
  return finish(cuMemHostRegister_v2(ptr, bytes, flags));
}
RUNTIME_API cudaHostUnregister(void* ptr) {
  RUNTIME_ENTER();
  return finish(cuMemHostUnregister(ptr));
}
RUNTIME_API cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  RUNTIME_ENTER();
  return finish(cuMemGetInfo_v2(free_bytes, total_bytes));
}

RUNTIME_API cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  RUNTIME_ENTER();
  if (bytes != 0 && !direction_fits(to, from, kind)) return finish(cudaErrorInvalidMemcpyDirection);
  return finish(cuMemcpyAsync(address(to), address(from), bytes, stream));
}
RUNTIME_API cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  RUNTIME_ENTER();
  if (bytes != 0 && !direction_fits(to, from, kind)) return finish(cudaErrorInvalidMemcpyDirection);
  return finish(cuMemcpy(address(to), address(from), bytes));
}
RUNTIME_API cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes,
                                cudaStream_t stream) {
  RUNTIME_ENTER();
  return finish(cuMemcpyAsync(address(to), address(from), bytes, stream));
}
RUNTIME_API cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  RUNTIME_ENTER();
  if (width != 0 && height != 0 && !direction_fits(to, from, kind))
    return finish(cudaErrorInvalidMemcpyDirection);
  return finish(softcuda_copy_2d(to, to_pitch, from, from_pitch, width, height, stream));
}
RUNTIME_API cudaMemsetAsync(void* ptr, int value, std::size_t bytes, cudaStream_t stream) {
  RUNTIME_ENTER();
  return finish(cuMemsetD8Async(address(ptr), static_cast<unsigned char>(value), bytes, stream));
}
RUNTIME_API cudaMemset(void* ptr, int value, std::size_t bytes) {
  RUNTIME_ENTER();
  return finish(cuMemsetD8Async(address(ptr), static_cast<unsigned char>(value), bytes, nullptr));
}

RUNTIME_API cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* ptr) {
  RUNTIME_ENTER();
  if (!attributes) return finish(cudaErrorInvalidValue);
  *attributes = {};
  attributes->device = -1;
  attributes->type = cudaMemoryTypeUnregistered;
  constexpr int kMemoryType = 2, kManaged = 8, kOrdinal = 9, kHostType = 1;
  unsigned type = 0, managed = 0;
  if (cuPointerGetAttribute(&type, kMemoryType, address(ptr)) != 0) return finish(0);
  cuPointerGetAttribute(&managed, kManaged, address(ptr));
  cuPointerGetAttribute(&attributes->device, kOrdinal, address(ptr));
  attributes->type = managed             ? cudaMemoryTypeManaged
                     : type == kHostType ? cudaMemoryTypeHost
                                         : cudaMemoryTypeDevice;
  attributes->devicePointer = const_cast<void*>(ptr);
  if (attributes->type != cudaMemoryTypeDevice) attributes->hostPointer = const_cast<void*>(ptr);
  return finish(0);
}

RUNTIME_API cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  RUNTIME_ENTER();
  if (!pool) return finish(cudaErrorInvalidValue);
  if (device < 0 || device >= softcuda_device_count()) return finish(cudaErrorInvalidDevice);
  *pool = reinterpret_cast<cudaMemPool_t>(&pool_of(device));
  return finish(0);
}
RUNTIME_API cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  RUNTIME_ENTER();
  if (!pool || !value) return finish(cudaErrorInvalidValue);
  const std::lock_guard guard(g_pools_mutex);
  reinterpret_cast<Pool*>(pool)->attributes[attribute] =
      is_word(attribute) ? static_cast<std::uint64_t>(*static_cast<int*>(value))
                         : *static_cast<std::uint64_t*>(value);
  return finish(0);
}
RUNTIME_API cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  RUNTIME_ENTER();
  if (!pool || !value) return finish(cudaErrorInvalidValue);
  const std::lock_guard guard(g_pools_mutex);
  const std::uint64_t set = reinterpret_cast<Pool*>(pool)->attributes[attribute];
  if (is_word(attribute))
    *static_cast<int*>(value) = static_cast<int>(set);
  else
    *static_cast<std::uint64_t*>(value) = set;
  return finish(0);
}
RUNTIME_API cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc*, std::size_t) {
  RUNTIME_ENTER();
  return finish(pool ? 0 : cudaErrorInvalidValue);  // every device reaches all memory here
}
RUNTIME_API cudaMemPoolTrimTo(cudaMemPool_t pool, std::size_t) {
  RUNTIME_ENTER();
  return finish(pool ? 0 : cudaErrorInvalidValue);  // nothing is cached
}

// Sharing memory and events with other processes is not offered: an error, never a wrong pointer.
RUNTIME_API cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) {
  RUNTIME_ENTER();
  return finish(cudaErrorNotSupported);
}
RUNTIME_API cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) {
  RUNTIME_ENTER();
  return finish(cudaErrorNotSupported);
}
RUNTIME_API cudaIpcCloseMemHandle(void*) {
  RUNTIME_ENTER();
  return finish(cudaErrorNotSupported);
}
RUNTIME_API cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) {
  RUNTIME_ENTER();
  return finish(cudaErrorNotSupported);
}
RUNTIME_API cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) {
  RUNTIME_ENTER();
  return finish(cudaErrorNotSupported);
}
