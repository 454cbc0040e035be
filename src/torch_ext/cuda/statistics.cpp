// Sums of the figures of umem and of torch's own allocator, which serves private pools. A sum of
// two peaks is an upper bound: they may have occurred at different times.
#include <algorithm>

#include "base/units.h"
#include "runtime/accounts.h"
#include "torch_ext/cuda/cuda_allocator.h"
#include "torch_ext/unlocked.h"

namespace umem::torch_ext {
namespace {

using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

void add(StatArray& sum, const arena::StatArray& stats) {
  const auto add_one = [&](StatType type, arena::StatType own_type) {
    auto& total = sum[static_cast<std::size_t>(type)];
    const arena::Stat& own = stats[own_type];
    total.current += own.current;
    total.peak += own.peak;
    total.allocated += own.allocated;
    total.freed += own.freed;
  };
  add_one(StatType::AGGREGATE, arena::kAll);
  add_one(StatType::SMALL_POOL, arena::kSmall);
  add_one(StatType::LARGE_POOL, arena::kLarge);
}

void add(DeviceStats& sum, const arena::ArenaStats& stats) {
  add(sum.allocation, stats.allocations);
  add(sum.segment, stats.segments);
  add(sum.active, stats.active);
  add(sum.inactive_split, stats.inactive_split);
  add(sum.allocated_bytes, stats.allocated_bytes);
  add(sum.reserved_bytes, stats.reserved_bytes);
  add(sum.active_bytes, stats.active_bytes);
  add(sum.inactive_split_bytes, stats.inactive_split_bytes);
  add(sum.requested_bytes, stats.requested_bytes);
  sum.num_alloc_retries += stats.retries;
  sum.num_ooms += stats.ooms;
  sum.num_device_alloc += stats.driver_allocs;
  sum.num_device_free += stats.driver_frees;
}

}  // namespace

DeviceStats CudaAllocator::getDeviceStats(c10::DeviceIndex device) {
  const Unlocked without_gil;
  DeviceStats stats = native_->getDeviceStats(device);
  add(stats, runtime::arena_stats(device));
  return stats;
}

void CudaAllocator::resetAccumulatedStats(c10::DeviceIndex device) {
  const Unlocked without_gil;
  native_->resetAccumulatedStats(device);
  runtime::reset_accumulated_arena_stats(device);
}

void CudaAllocator::resetPeakStats(c10::DeviceIndex device) {
  const Unlocked without_gil;
  native_->resetPeakStats(device);
  runtime::reset_peak_arena_stats(device);
}

// The share of the device's memory: the last setting if it is still in force, else the budget's.
double CudaAllocator::getMemoryFraction(c10::DeviceIndex device) {
  const Unlocked without_gil;
  const std::size_t now = runtime::budget(device);
  if (now == 0) return 1;
  {
    std::lock_guard guard(mutex_);
    if (fraction_.budget == now) return fraction_.set;
  }
  return static_cast<double>(now) / static_cast<double>(usable_bytes(device));
}

std::size_t CudaAllocator::usable_bytes(c10::DeviceIndex device) {
  return runtime::usable_bytes(native_->getMemoryInfo(device).second);
}

void CudaAllocator::setMemoryFraction(double fraction, c10::DeviceIndex device) {
  TORCH_CHECK_VALUE(fraction > 0 && fraction <= 1, "a memory fraction of ", fraction,
                    " was requested; umem's budget can be a fraction above 0 and up to 1 of the "
                    "device's memory");
  const Unlocked without_gil;
  const auto total = static_cast<double>(native_->getMemoryInfo(device).second);
  const auto usable = static_cast<double>(usable_bytes(device));
  const std::size_t wanted = std::max<std::size_t>(static_cast<std::size_t>(fraction * usable), 1);
  runtime::Failure failure;
  TORCH_CHECK_VALUE(runtime::set_budget(device, wanted, &failure), failure.message);
  native_->setMemoryFraction(static_cast<double>(wanted) / total, device);
  std::lock_guard guard(mutex_);
  fraction_ = {fraction, runtime::budget(device)};
}

// The memory that torch's own allocator holds for private pools, in addition to umem's.
std::size_t CudaAllocator::outside_bytes(c10::DeviceIndex device) {
  const auto reserved = native_->getDeviceStats(device)
                            .reserved_bytes[static_cast<std::size_t>(StatType::AGGREGATE)]
                            .current;
  return static_cast<std::size_t>(reserved);
}

void CudaAllocator::tell_outside_bytes(c10::DeviceIndex device) {
  const Unlocked without_gil;
  const std::lock_guard in_order(outside_mutex_);
  runtime::set_outside_bytes(device, outside_bytes(device));
}

bool CudaAllocator::make_way(c10::DeviceIndex device, std::size_t wanted) {
  // torch's own allocator asks the driver for a whole segment (its get_allocation_size).
  const std::size_t segment = wanted <= MiB       ? 2 * MiB
                              : wanted < 10 * MiB ? 20 * MiB
                                                  : align_up(wanted, 2 * MiB);
  const Unlocked without_gil;
  return runtime::make_way(device, outside_bytes(device) + segment);
}

void CudaAllocator::tell_outside_bytes() {
  for (int device = 0; device < device_count(); ++device)
    tell_outside_bytes(static_cast<c10::DeviceIndex>(device));
}

}  // namespace umem::torch_ext
