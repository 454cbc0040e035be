// Memory entry points of the software device: allocation, prefetch, discard, advice, attributes.
#include "soft/memory_entries.h"

#include <algorithm>
#include <cstring>

#include "soft/rules.h"
#include "soft/state.h"

namespace umem::soft {
namespace {

using namespace umem::cu;  // NOLINT: the driver's own vocabulary

constexpr int kDevices = 1;

// The reason of a failed allocation or move: no room, or the kernel refused.
CUresult lack() {
  return g_device->pager.space().refused() ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_ERROR_OUT_OF_MEMORY;
}

Pager::Extent reserve(std::size_t bytes) {
  Pager& pager = g_device->pager;
  // Rounding up a size near the largest would wrap around.
  const std::size_t most = pager.space().pages();
  return pager.allocate(bytes > most << kPageShift ? most + 1 : pages_of(bytes));
}

CUresult alloc_managed(CUdeviceptr* ptr, std::size_t bytes, unsigned flags) {
  if (!ptr || bytes == 0 || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST))
    return CUDA_ERROR_INVALID_VALUE;
  DeviceLock lock;
  if (!g_device) return CUDA_ERROR_NOT_INITIALIZED;
  const Pager::Extent extent = reserve(bytes);
  if (extent.count == 0) return lack();
  *ptr = g_device->pager.space().managed(extent.first);
  return CUDA_SUCCESS;
}

// Plain device memory: frames that never leave.
CUresult alloc_device(CUdeviceptr* ptr, std::size_t bytes) {
  if (!ptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  DeviceLock lock;
  if (!g_device) return CUDA_ERROR_NOT_INITIALIZED;
  Pager& pager = g_device->pager;
  const Pager::Extent extent = reserve(bytes);
  if (extent.count == 0) return lack();
  Moved moved;
  const bool held = pager.pin_on_device(extent, moved);
  g_device->book_transfer(moved, nullptr);
  if (!held) {
    const CUresult result = lack();
    pager.free(extent);  // pages without a frame cannot be refused
    return result;
  }
  *ptr = pager.space().managed(extent.first);
  return CUDA_SUCCESS;
}

CUresult free_memory(CUdeviceptr ptr) {
  if (ptr == 0) return CUDA_SUCCESS;
  DeviceLock lock;
  if (!g_device) return CUDA_ERROR_NOT_INITIALIZED;
  Pager& pager = g_device->pager;
  const Pager::Extent extent = pager.find(ptr);
  if (extent.count == 0 || pager.space().managed(extent.first) != ptr)
    return CUDA_ERROR_INVALID_VALUE;
  g_device->clock.synchronize_all();  // cuMemFree waits for the device
  return pager.free(extent) ? CUDA_SUCCESS : lack();
}

CUresult mem_info(std::size_t* free_bytes, std::size_t* total_bytes) {
  if (!free_bytes || !total_bytes) return CUDA_ERROR_INVALID_VALUE;
  DeviceLock lock;
  if (!g_device) return CUDA_ERROR_NOT_INITIALIZED;
  const Pager& pager = g_device->pager;
  *total_bytes = pager.frames() << kPageShift;
  *free_bytes = (pager.frames() - std::min(pager.frames(), pager.used_frames())) << kPageShift;
  return CUDA_SUCCESS;
}

// The pages of [ptr, ptr + bytes), rounded outwards, or only the whole ones in it; count 0 when the
// bytes are not all in one allocation (or hold no whole page).
struct Lookup {
  Pager::Extent extent;
  bool managed = false;
};
Lookup look_up(CUdeviceptr ptr, std::size_t bytes, bool whole_pages_only) {
  const Pager& pager = g_device->pager;
  const Pager::Extent owner = pager.find(ptr);
  if (owner.count == 0 || bytes == 0) return {};
  const std::uintptr_t base = pager.space().managed(owner.first);
  if (!inside(ptr, bytes, base, owner.count << kPageShift)) return {};
  if (g_device->pager.page(owner.first).pinned) return {};
  std::size_t first = (ptr - base) >> kPageShift;
  std::size_t end = pages_of(ptr - base + bytes);
  if (whole_pages_only) {
    first = pages_of(ptr - base);
    end = std::max<std::size_t>(first, (ptr - base + bytes) >> kPageShift);
  }
  return {{owner.first + first, end - first}, true};
}

CUresult move(const Pager::Extent& extent, const CUmemLocation& location, CUstream stream) {
  Moved moved;
  const bool to_device = location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  if (to_device) g_device->wait_for_host(extent, stream);
  const bool done = to_device ? g_device->pager.to_device(extent, moved)
                              : g_device->pager.prefetch_to_host(extent, moved);
  g_device->book_transfer(moved, stream);
  return done ? CUDA_SUCCESS : lack();
}

CUresult prefetch(CUdeviceptr ptr, std::size_t bytes, CUmemLocation location, unsigned flags,
                  CUstream stream) {
  DeviceLock lock;
  if (!g_device) return CUDA_ERROR_NOT_INITIALIZED;
  if (!g_device->clock.known(stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (flags != 0 || !valid_location(location, kDevices)) return CUDA_ERROR_INVALID_VALUE;
  const Lookup found = look_up(ptr, bytes, false);
  if (!found.managed) return CUDA_ERROR_INVALID_VALUE;
  return move(found.extent, location, stream);
}

// The rules that all three batch calls share: everything is checked before anything is done.
CUresult check_ranges(const CUdeviceptr* ptrs, const std::size_t* sizes, std::size_t count,
                      unsigned long long flags, CUstream stream) {
  if (!g_device) return CUDA_ERROR_NOT_INITIALIZED;
  if (const CUresult result = check_batch(ptrs, sizes, count, flags, stream)) return result;
  if (!g_device->clock.known(stream)) return CUDA_ERROR_INVALID_HANDLE;
  for (std::size_t i = 0; i < count; ++i)
    if (!look_up(ptrs[i], sizes[i], false).managed) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

CUresult move_batch(const CUdeviceptr* ptrs, const std::size_t* sizes, std::size_t count,
                    const Destinations& to, unsigned long long flags, CUstream stream,
                    bool discard_first) {
  DeviceLock lock;
  CUresult result = check_ranges(ptrs, sizes, count, flags, stream);
  if (result == CUDA_SUCCESS) result = to.check(count, kDevices);
  for (std::size_t i = 0; i < count && result == CUDA_SUCCESS; ++i) {
    if (discard_first) g_device->pager.discard(look_up(ptrs[i], sizes[i], true).extent);
    result = move(look_up(ptrs[i], sizes[i], false).extent, to.of(i), stream);
  }
  return result;
}

CUresult prefetch_batch(CUdeviceptr* ptrs, std::size_t* sizes, std::size_t count,
                        CUmemLocation* locations, std::size_t* first_of, std::size_t n_locations,
                        unsigned long long flags, CUstream stream) {
  return move_batch(ptrs, sizes, count, {locations, first_of, n_locations}, flags, stream, false);
}

CUresult discard_batch(CUdeviceptr* ptrs, std::size_t* sizes, std::size_t count,
                       unsigned long long flags, CUstream stream) {
  DeviceLock lock;
  const CUresult result = check_ranges(ptrs, sizes, count, flags, stream);
  if (result != CUDA_SUCCESS) return result;
  for (std::size_t i = 0; i < count; ++i)
    g_device->pager.discard(look_up(ptrs[i], sizes[i], true).extent);
  return CUDA_SUCCESS;
}

CUresult discard_and_prefetch_batch(CUdeviceptr* ptrs, std::size_t* sizes, std::size_t count,
                                    CUmemLocation* locations, std::size_t* first_of,
                                    std::size_t n_locations, unsigned long long flags,
                                    CUstream stream) {
  return move_batch(ptrs, sizes, count, {locations, first_of, n_locations}, flags, stream, true);
}

bool apply_advice(Page& page, CUmem_advise advice, const CUmemLocation& location) {
  switch (advice) {
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
      page.preferred = location.type == CU_MEM_LOCATION_TYPE_DEVICE ? 0 : CU_DEVICE_CPU;
      return true;
    case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
      page.preferred = CU_DEVICE_INVALID;
      return true;
    case CU_MEM_ADVISE_SET_ACCESSED_BY:
    case CU_MEM_ADVISE_UNSET_ACCESSED_BY:
      if (location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        page.accessed_by = advice == CU_MEM_ADVISE_SET_ACCESSED_BY;
      return true;
    default:
      return false;
  }
  return false;
}

CUresult advise(CUdeviceptr ptr, std::size_t bytes, CUmem_advise advice, CUmemLocation location) {
  DeviceLock lock;
  if (!g_device) return CUDA_ERROR_NOT_INITIALIZED;
  const bool located = advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION ||
                       advice == CU_MEM_ADVISE_SET_ACCESSED_BY ||
                       advice == CU_MEM_ADVISE_UNSET_ACCESSED_BY;
  if (located && !valid_location(location, kDevices)) return CUDA_ERROR_INVALID_VALUE;
  const bool numa = location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA ||
                    location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
  if (advice == CU_MEM_ADVISE_SET_ACCESSED_BY && numa) return CUDA_ERROR_INVALID_VALUE;
  const Lookup found = look_up(ptr, bytes, false);
  if (!found.managed) return CUDA_ERROR_INVALID_VALUE;
  const bool on = advice == CU_MEM_ADVISE_SET_READ_MOSTLY;
  if (on || advice == CU_MEM_ADVISE_UNSET_READ_MOSTLY)
    return g_device->pager.set_read_mostly(found.extent, on) ? CUDA_SUCCESS : lack();
  for (std::size_t i = found.extent.first; i < found.extent.first + found.extent.count; ++i)
    if (!apply_advice(g_device->pager.page(i), advice, location)) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

// The value that all pages share, or `mixed`.
template <class Get>
int common_value(const Pager::Extent& extent, int mixed, Get get) {
  const int value = get(g_device->pager.page(extent.first));
  for (std::size_t i = extent.first; i < extent.first + extent.count; ++i)
    if (get(g_device->pager.page(i)) != value) return mixed;
  return value;
}

CUresult range_attribute_locked(void* data, std::size_t data_bytes, CUmem_range_attribute attribute,
                                CUdeviceptr ptr, std::size_t bytes) {
  if (!g_device) return CUDA_ERROR_NOT_INITIALIZED;
  const Lookup found = look_up(ptr, bytes, false);
  if (!found.managed || !data || data_bytes < sizeof(int) || data_bytes % sizeof(int) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  auto* values = static_cast<int*>(data);
  switch (attribute) {
    case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
      *values = common_value(found.extent, 0, [](const Page& p) { return int{p.read_mostly}; });
      return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION:
      *values = common_value(found.extent, CU_DEVICE_INVALID,
                             [](const Page& p) { return int{p.preferred}; });
      return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION:
      *values = common_value(found.extent, CU_DEVICE_INVALID,
                             [](const Page& p) { return int{p.last_prefetch}; });
      return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY:
      std::fill_n(values, data_bytes / sizeof(int), CU_DEVICE_INVALID);
      if (common_value(found.extent, 0, [](const Page& p) { return int{p.accessed_by}; }))
        values[0] = 0;
      return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult range_attribute(void* data, std::size_t data_bytes, CUmem_range_attribute attribute,
                         CUdeviceptr ptr, std::size_t bytes) {
  DeviceLock lock;
  return range_attribute_locked(data, data_bytes, attribute, ptr, bytes);
}

CUresult range_attributes(void** data, std::size_t* data_bytes, CUmem_range_attribute* attributes,
                          std::size_t count, CUdeviceptr ptr, std::size_t bytes) {
  if (!data || !data_bytes || !attributes || count == 0) return CUDA_ERROR_INVALID_VALUE;
  DeviceLock lock;
  for (std::size_t i = 0; i < count; ++i) {
    const CUresult result =
        range_attribute_locked(data[i], data_bytes[i], attributes[i], ptr, bytes);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

CUresult pointer_attribute(void* data, CUpointer_attribute attribute, CUdeviceptr ptr) {
  if (!data) return CUDA_ERROR_INVALID_VALUE;
  DeviceLock lock;
  if (!g_device) return CUDA_ERROR_NOT_INITIALIZED;
  const Pager& pager = g_device->pager;
  const Pager::Extent owner = pager.find(ptr);
  if (owner.count == 0) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(data) = CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      *static_cast<unsigned*>(data) = g_device->pager.page(owner.first).pinned ? 0 : 1;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(data) = 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *static_cast<CUdeviceptr*>(data) = pager.space().managed(owner.first);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *static_cast<std::size_t*>(data) = owner.count << kPageShift;
      return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult check_stream(CUstream stream) {
  DeviceLock lock;
  if (!g_device) return CUDA_ERROR_NOT_INITIALIZED;
  return g_device->clock.known(stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

// Copy and fill touch the pages as a kernel would, so without the lock: an absent one faults.
CUresult copy(CUdeviceptr destination, CUdeviceptr source, std::size_t bytes, CUstream stream) {
  const CUresult result = check_stream(stream);
  if (result != CUDA_SUCCESS) return result;
  if (bytes > 0 && (!destination || !source)) return CUDA_ERROR_INVALID_VALUE;
  if (g_unbacked) return CUDA_ERROR_NOT_SUPPORTED;  // no contents, and one side is not managed
  std::memmove(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), bytes);
  return CUDA_SUCCESS;
}

CUresult fill(CUdeviceptr destination, unsigned char value, std::size_t bytes, CUstream stream) {
  const CUresult result = check_stream(stream);
  if (result != CUDA_SUCCESS) return result;
  if (bytes > 0 && !destination) return CUDA_ERROR_INVALID_VALUE;
  if (g_unbacked) return CUDA_ERROR_NOT_SUPPORTED;
  std::memset(reinterpret_cast<void*>(destination), value, bytes);
  return CUDA_SUCCESS;
}

}  // namespace

void fill_memory_entries(driver::Table& table) {
  table.cuMemGetInfo = mem_info;
  table.cuMemAlloc = alloc_device;
  table.cuMemAllocManaged = alloc_managed;
  table.cuMemFree = free_memory;
  table.cuMemPrefetchAsync = prefetch;
  table.cuMemPrefetchBatchAsync = prefetch_batch;
  table.cuMemDiscardBatchAsync = discard_batch;
  table.cuMemDiscardAndPrefetchBatchAsync = discard_and_prefetch_batch;
  table.cuMemAdvise = advise;
  table.cuMemRangeGetAttribute = range_attribute;
  table.cuMemRangeGetAttributes = range_attributes;
  table.cuPointerGetAttribute = pointer_attribute;
  table.cuMemcpyAsync = copy;
  table.cuMemsetD8Async = fill;
}

}  // namespace umem::soft
