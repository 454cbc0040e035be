// Memory entry points: allocation, managed memory, host memory, attributes.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/units.h"
#include "capture.h"
#include "config.h"
#include "entry.h"
#include "soft/rules.h"
#include "softcuda.h"
#include "vmm.h"
#include "work.h"

using namespace softcuda;    // NOLINT
using namespace umem::soft;  // NOLINT: rules.h

namespace {

constexpr CUresult kAlreadyRegistered = static_cast<CUresult>(712);
constexpr CUresult kNotRegistered = static_cast<CUresult>(713);

// Allocation and release are forbidden during a capture.
CUresult check_allocation_call() {
  RETURN_IF_FAILED(check_context());
  const auto lock = lock_work();
  return check_unsafe();
}

CUresult wait_for_everything() {
  auto lock = lock_work();
  RETURN_IF_FAILED(check_unsafe());
  wait_device(lock, -1);
  return device_state();
}

void add_memory(const Allocation& allocation) {
  add_allocation(allocation);
  const auto lock = lock_work();
  races().allocated(allocation.base, allocation.bytes);
}

// Nothing for an unknown address.
Accesses freeing(CUdeviceptr ptr, const char* name) {
  Allocation found;
  if (!find_allocation(ptr, found) || found.base != ptr || found.mapped) return {};
  return {{ptr, ptr + found.bytes, Use::kFree, name}};
}

void enter_free(CUdeviceptr ptr, const char* name) {
  const auto lock = lock_work();
  for (const Access& access : freeing(ptr, name)) races().done_by_host(access);
}

CUresult release(CUdeviceptr ptr) {
  Allocation found;
  if (!find_allocation(ptr, found) || found.base != ptr || found.mapped ||
      found.kind == Kind::kHost)
    return CUDA_ERROR_INVALID_VALUE;
  remove_allocation(ptr);
  return soft().cuMemFree(ptr);
}

// src/soft has one device, number 0.
CUmemLocation to_soft(CUmemLocation location) {
  if (location.type == CU_MEM_LOCATION_TYPE_DEVICE) location.id = 0;
  return location;
}

struct Range {
  CUdeviceptr ptr;
  std::size_t bytes;
  CUmemLocation location;
};

CUresult prefetch_now(const Range& range) {
  const bool to_device = range.location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  const std::size_t bytes = to_device ? make_room(range.location.id, range.bytes) : range.bytes;
  if (bytes == 0) return CUDA_ERROR_OUT_OF_MEMORY;  // only plain memory there
  RETURN_IF_FAILED(
      soft().cuMemPrefetchAsync(range.ptr, bytes, to_soft(range.location), 0, per_thread_stream()));
  if (to_device) set_home(range.ptr, bytes, range.location.id);
  return CUDA_SUCCESS;
}

CUresult discard_now(Range range) {
  return soft().cuMemDiscardBatchAsync(&range.ptr, &range.bytes, 1, 0, per_thread_stream());
}

// Managed-memory hints have no graph node: a stream that captures refuses them.
CUresult enqueue_hint(CUstream handle, Work work, Accesses accesses, Hint hint) {
  auto lock = lock_work();
  const StreamRef stream = find_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) return check_not_capturing(stream);
  return enqueue(stream, {std::move(work), {}, false, std::move(accesses), {}, hint});
}

Hint hint_to(CUmemLocation location) {
  return location.type == CU_MEM_LOCATION_TYPE_DEVICE ? Hint::kWorker : Hint::kCaller;
}

enum class Batch { kPrefetch, kDiscard, kDiscardAndPrefetch };

const char* name_of(Batch kind) {
  return kind == Batch::kPrefetch  ? "cuMemPrefetchBatchAsync"
         : kind == Batch::kDiscard ? "cuMemDiscardBatchAsync"
                                   : "cuMemDiscardAndPrefetchBatchAsync";
}

CUresult enqueue_batch(const Call& call, Batch kind, const CUdeviceptr* ptrs,
                       const std::size_t* bytes, std::size_t count, const Destinations& to,
                       unsigned long long flags, CUstream stream) {
  RETURN_IF_FAILED(check_context());
  RETURN_IF_FAILED(check_batch(ptrs, bytes, count, flags, stream));
  if (kind != Batch::kDiscard) RETURN_IF_FAILED(to.check(count, device_count()));
  if (call.torn()) count /= 2;
  std::vector<Range> ranges;
  Accesses accesses;
  const Use use = kind == Batch::kPrefetch ? Use::kMove : Use::kDiscard;
  for (std::size_t i = 0; i < count; ++i) {
    if (!is_managed(ptrs[i], bytes[i])) return CUDA_ERROR_INVALID_VALUE;
    ranges.push_back({ptrs[i], bytes[i], kind == Batch::kDiscard ? CUmemLocation{} : to.of(i)});
    accesses.push_back({ptrs[i], ptrs[i] + bytes[i], use, name_of(kind)});
  }
  const bool leaves = kind == Batch::kPrefetch && count > 0;
  const Hint hint = leaves ? hint_to(ranges.front().location) : Hint::kWorker;
  const Work work = [kind, ranges = std::move(ranges)] {
    for (const Range& range : ranges) {
      if (kind != Batch::kPrefetch) RETURN_IF_FAILED(discard_now(range));
      if (kind != Batch::kDiscard) RETURN_IF_FAILED(prefetch_now(range));
    }
    return CUDA_SUCCESS;
  };
  if (count > 0) RETURN_IF_FAILED(enqueue_hint(stream, work, std::move(accesses), hint));
  return call.torn() ? static_cast<CUresult>(call.torn_result()) : CUDA_SUCCESS;
}

}  // namespace

ENTRY(cuMemGetInfo_v2, 3020, (std::size_t* free_bytes, std::size_t* total_bytes)) {
  SOFTCUDA_ENTER();
  if (!free_bytes || !total_bytes) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_context());
  *total_bytes = config().bytes;
  const std::size_t used = used_bytes(current_device()) + config().page_cache;
  *free_bytes = config().bytes - std::min(config().bytes, used);
  return CUDA_SUCCESS;
}

ENTRY(cuMemAlloc_v2, 3020, (CUdeviceptr * ptr, std::size_t bytes)) {
  SOFTCUDA_ENTER();
  if (!ptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_allocation_call());
  if (bytes > config().bytes || make_room(current_device(), bytes) < bytes)
    return CUDA_ERROR_OUT_OF_MEMORY;
  RETURN_IF_FAILED(soft().cuMemAlloc(ptr, bytes));
  add_memory({*ptr, bytes, Kind::kDevice, current_device(), false});
  return CUDA_SUCCESS;
}

ENTRY(cuMemAllocManaged, 6000, (CUdeviceptr * ptr, std::size_t bytes, unsigned flags)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_allocation_call());
  RETURN_IF_FAILED(soft().cuMemAllocManaged(ptr, bytes, flags));
  add_memory({*ptr, bytes, Kind::kManaged, current_device(), false});
  return CUDA_SUCCESS;
}

ENTRY(cuMemFree_v2, 3020, (CUdeviceptr ptr)) {
  SOFTCUDA_ENTER();
  if (ptr == 0) return CUDA_SUCCESS;
  RETURN_IF_FAILED(check_context());
  RETURN_IF_FAILED(wait_for_everything());
  enter_free(ptr, "cuMemFree");
  return release(ptr);
}

int softcuda_free_async(void* ptr, void* stream) {
  const auto address = reinterpret_cast<CUdeviceptr>(ptr);
  return enqueue_on(
      static_cast<CUstream>(stream), [address] { return release(address); },
      freeing(address, "cudaFreeAsync"));
}

ENTRY(cuMemHostAlloc, 2020, (void** ptr, std::size_t bytes, unsigned)) {
  SOFTCUDA_ENTER();
  if (!ptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_allocation_call());
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *ptr = memory;
  add_memory(
      {reinterpret_cast<std::uintptr_t>(memory), bytes, Kind::kHost, current_device(), false});
  return CUDA_SUCCESS;
}
ENTRY(cuMemAllocHost_v2, 3020, (void** ptr, std::size_t bytes)) {
  SOFTCUDA_ENTER();
  return cuMemHostAlloc(ptr, bytes, 0);
}
ENTRY(cuMemFreeHost, 2000, (void* ptr)) {
  SOFTCUDA_ENTER();
  if (!ptr) return CUDA_SUCCESS;
  RETURN_IF_FAILED(check_context());
  Allocation found;
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  if (!find_allocation(address, found) || found.base != address || found.kind != Kind::kHost ||
      found.registered || found.mapped)
    return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(wait_for_everything());
  remove_allocation(address);
  munmap(ptr, found.bytes);
  return CUDA_SUCCESS;
}
ENTRY(cuMemHostGetDevicePointer_v2, 3020, (CUdeviceptr * device, void* ptr, unsigned flags)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_context());
  Allocation found;
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  if (!device || flags != 0 || !find_allocation(address, found) || found.kind != Kind::kHost)
    return CUDA_ERROR_INVALID_VALUE;
  *device = address;
  return CUDA_SUCCESS;
}
ENTRY(cuMemHostRegister_v2, 6050, (void* ptr, std::size_t bytes, unsigned)) {
  SOFTCUDA_ENTER();
  if (!ptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_allocation_call());
  Allocation found;
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  if (find_allocation(address, found)) return kAlreadyRegistered;
  add_memory({address, bytes, Kind::kHost, current_device(), true});
  return CUDA_SUCCESS;
}
ENTRY(cuMemHostUnregister, 4000, (void* ptr)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_context());
  Allocation found;
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  if (!find_allocation(address, found) || found.base != address || !found.registered)
    return kNotRegistered;
  RETURN_IF_FAILED(wait_for_everything());
  remove_allocation(address);
  return CUDA_SUCCESS;
}

ENTRY(cuMemPrefetchAsync_v2, 12020,
      (CUdeviceptr ptr, std::size_t bytes, CUmemLocation location, unsigned flags,
       CUstream stream)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_context());
  if (flags != 0 || !valid_location(location, device_count()) || !is_managed(ptr, bytes))
    return CUDA_ERROR_INVALID_VALUE;
  const Range range{ptr, bytes, location};
  return enqueue_hint(
      stream, [range] { return prefetch_now(range); },
      {{ptr, ptr + bytes, Use::kMove, "cuMemPrefetchAsync"}}, hint_to(location));
}
ENTRY(cuMemPrefetchAsync, 8000,
      (CUdeviceptr ptr, std::size_t bytes, CUdevice device, CUstream stream)) {
  const CUmemLocation host{CU_MEM_LOCATION_TYPE_HOST, 0};
  const CUmemLocation there{CU_MEM_LOCATION_TYPE_DEVICE, device};
  return cuMemPrefetchAsync_v2(ptr, bytes, device == CU_DEVICE_CPU ? host : there, 0, stream);
}
ENTRY(cuMemPrefetchBatchAsync, 13000,
      (CUdeviceptr * ptrs, std::size_t* bytes, std::size_t count, CUmemLocation* locations,
       std::size_t* first_of, std::size_t n_locations, unsigned long long flags, CUstream stream)) {
  SOFTCUDA_ENTER();
  return enqueue_batch(softcuda_call, Batch::kPrefetch, ptrs, bytes, count,
                       {locations, first_of, n_locations}, flags, stream);
}
ENTRY(cuMemDiscardBatchAsync, 13000,
      (CUdeviceptr * ptrs, std::size_t* bytes, std::size_t count, unsigned long long flags,
       CUstream stream)) {
  SOFTCUDA_ENTER();
  return enqueue_batch(softcuda_call, Batch::kDiscard, ptrs, bytes, count, {}, flags, stream);
}
ENTRY(cuMemDiscardAndPrefetchBatchAsync, 13000,
      (CUdeviceptr * ptrs, std::size_t* bytes, std::size_t count, CUmemLocation* locations,
       std::size_t* first_of, std::size_t n_locations, unsigned long long flags, CUstream stream)) {
  SOFTCUDA_ENTER();
  return enqueue_batch(softcuda_call, Batch::kDiscardAndPrefetch, ptrs, bytes, count,
                       {locations, first_of, n_locations}, flags, stream);
}
ENTRY(cuMemAdvise_v2, 12020,
      (CUdeviceptr ptr, std::size_t bytes, CUmem_advise advice, CUmemLocation location)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_context());
  return soft().cuMemAdvise(ptr, bytes, advice, to_soft(location));
}
ENTRY(cuMemAdvise, 8000,
      (CUdeviceptr ptr, std::size_t bytes, CUmem_advise advice, CUdevice device)) {
  const CUmemLocation host{CU_MEM_LOCATION_TYPE_HOST, 0};
  const CUmemLocation there{CU_MEM_LOCATION_TYPE_DEVICE, device};
  return cuMemAdvise_v2(ptr, bytes, advice, device == CU_DEVICE_CPU ? host : there);
}
ENTRY(cuMemRangeGetAttribute, 8000,
      (void* data, std::size_t data_bytes, CUmem_range_attribute attribute, CUdeviceptr ptr,
       std::size_t bytes)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_context());
  return soft().cuMemRangeGetAttribute(data, data_bytes, attribute, ptr, bytes);
}
ENTRY(cuMemRangeGetAttributes, 8000,
      (void** data, std::size_t* data_bytes, CUmem_range_attribute* attributes, std::size_t count,
       CUdeviceptr ptr, std::size_t bytes)) {
  SOFTCUDA_ENTER();
  RETURN_IF_FAILED(check_context());
  return soft().cuMemRangeGetAttributes(data, data_bytes, attributes, count, ptr, bytes);
}

ENTRY(cuPointerGetAttribute, 4000, (void* data, CUpointer_attribute attribute, CUdeviceptr ptr)) {
  SOFTCUDA_ENTER();
  if (!data) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_initialized());
  Allocation found;
  const bool backed = find_allocation(ptr, found);
  // At reserved addresses, the range is the reservation, mapped or not.
  AddressRange range{found.base, found.bytes};
  if (!find_reservation(ptr, range) && !backed) return CUDA_ERROR_INVALID_VALUE;
  switch (static_cast<int>(attribute)) {
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *static_cast<CUdeviceptr*>(data) = range.base;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *static_cast<std::size_t*>(data) = range.bytes;
      return CUDA_SUCCESS;
    case 13:  // MAPPED
      *static_cast<bool*>(data) = backed;
      return CUDA_SUCCESS;
  }
  if (!backed) return CUDA_ERROR_INVALID_VALUE;
  switch (static_cast<int>(attribute)) {
    case 1:  // CONTEXT
      *static_cast<CUcontext*>(data) = context_of(found.device);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(data) =
          found.kind == Kind::kHost ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case 3:  // DEVICE_POINTER
    case 4:  // HOST_POINTER
      *static_cast<CUdeviceptr*>(data) = ptr;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      *static_cast<unsigned*>(data) = found.kind == Kind::kManaged;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(data) = found.device;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// Queries of an unknown pointer, and unknown attributes, return zeros.
ENTRY(cuPointerGetAttributes, 7000,
      (unsigned count, CUpointer_attribute* attributes, void** data, CUdeviceptr ptr)) {
  SOFTCUDA_ENTER();
  if (!attributes || !data) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_FAILED(check_initialized());
  for (unsigned i = 0; i < count; ++i)
    if (cuPointerGetAttribute(data[i], attributes[i], ptr) != CUDA_SUCCESS)
      *static_cast<unsigned*>(data[i]) = 0;
  return CUDA_SUCCESS;
}
