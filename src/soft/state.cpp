#include "soft/state.h"

#include <utility>

namespace umem::soft {

Device* g_device = nullptr;
std::atomic<std::uint64_t> g_faults{0};

void Device::book_fault(const Moved& moved) {
  g_faults.fetch_add(1, std::memory_order_relaxed);
  ++counters.faults;
  counters.fault_bytes_in += moved.bytes_in;
  counters.pressure_bytes_out += moved.bytes_out;
  clock.fault(moved.bytes_in, moved.bytes_out);
  log.book(true, profile);
}

void Device::book_transfer(const Moved& moved, cu::CUstream stream) {
  counters.bytes_in += moved.bytes_in;
  counters.bytes_out += moved.bytes_out;
  clock.transfer(stream, moved.bytes_in, moved.bytes_out);
  log.book(false, profile);
}

void Device::wait_for_host(const Pager::Extent& extent, cu::CUstream stream) {
  for (std::size_t i = extent.first; i < extent.first + extent.count; ++i)
    if (const std::uint32_t work = std::exchange(pager.page(i).work, 0))
      clock.wait_for_host(stream, work - 1);
}

// The part of [ptr, ptr + bytes) that is managed, as an extent of allocated pages.
Pager::Extent managed_part(const void* ptr, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(ptr);
  const Pager::Extent whole = g_device->pager.find(begin);
  if (whole.count == 0 || bytes == 0) return {};
  const std::size_t first = g_device->pager.space().page_of(begin);
  const std::size_t last = g_device->pager.space().page_of(begin + bytes - 1);
  return {first, std::min(last + 1, whole.first + whole.count) - first};
}

}  // namespace umem::soft
