// One device that umem serves, and its place in the runtime.
#pragma once
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "arena/arena.h"
#include "driver/table.h"
#include "engine/engine.h"
#include "managed/freer.h"
#include "managed/range_table.h"
#include "runtime/ballast.h"
#include "runtime/pin.h"

namespace umem::runtime {

inline constexpr int kMaxDevices = 32;

// One device that umem serves.
struct Device {
  Device(driver::Driver& driver, managed::RangeTable& ranges, driver::Place place, bool managed,
         const policy::Policy& policy, void (*release_cached)(Device&));

  driver::Place place;
  std::unique_ptr<Ballast> ballast;  // if the device is made smaller; freed last
  // A GPU's memory is freed on a thread; the software device's at once.
  managed::Freer freer;
  arena::Arena arena;
  engine::Engine engine;
  Pins pins;
  std::unordered_map<const void*, std::uint32_t> scopes;  // number of each block's scope
  std::size_t peak_live_bytes = 0;                        // since the last reset
  std::size_t peak_small_bytes = 0;                       // the part in blocks that share pages
  std::size_t max_live_bytes = 0;  // since the start: an upper bound of the cache
  std::uint64_t ops_above_budget = 0;
  std::size_t largest_op_bytes = 0;  // the largest of these ops
  bool warned_above_budget = false, warned_thrashing = false, warned_refused = false;

  // Resets the peaks to the current usage.
  void set_peak() {
    peak_live_bytes = arena.footprint().live_bytes;
    const std::int64_t small = arena.stats().allocated_bytes[arena::kSmall].current;
    peak_small_bytes = static_cast<std::size_t>(small);
  }
  bool frees_on_thread() const { return place.context != nullptr; }
};

// Bitmask of device ordinals.
using DeviceMask = std::uint32_t;
static_assert(kMaxDevices <= 32);

inline DeviceMask mask_of(int ordinal) {
  return DeviceMask{1} << ordinal;
}
// Calls `act` with each ordinal in ascending order.
template <class Act>
void each_ordinal(DeviceMask mask, Act act) {
  for (; mask != 0; mask &= mask - 1) act(std::countr_zero(mask));
}

// A block that was released while another thread had the lock.
struct Released {
  void* block;
  Released* before;
};

// Never destroyed. Lock order: the registry's, devices' by ordinal, then the locks that are held
// for a moment (range table, recorder, scope names, torch's history).
struct Slot {
  std::mutex mutex;
  std::unique_ptr<Device> device;  // null before the first allocation
  std::uint64_t allocs = 0, frees = 0, ooms = 0;
  unsigned waiting = 0;  // threads that wait for the device without the lock: it must not be closed

  // Left to the next thread that takes the lock: released blocks, newest first, and ends of steps.
  std::atomic<Released*> released{nullptr};
  std::atomic<unsigned> steps{0};
};

}  // namespace umem::runtime
