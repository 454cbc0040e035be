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
         engine::Limits limits, const policy::Policy& policy, void (*release_cached)(Device&));

  driver::Place place;
  std::unique_ptr<Ballast> ballast;  // of a device that is to be smaller; given back last
  // Memory of a GPU goes back to its driver on a thread; on the software device at once.
  managed::Freer freer;
  arena::Arena arena;
  engine::Engine engine;
  Pins pins;
  std::unordered_map<const void*, std::uint32_t> scopes;  // of blocks, by number
  std::size_t peak_live_bytes = 0;                        // since the last reset
  std::size_t peak_small_bytes = 0;                       // of these, in blocks that share pages
  std::size_t max_live_bytes = 0;  // since the start: what the cache may hold
  std::uint64_t ops_above_budget = 0;
  std::size_t largest_op_bytes = 0;  // of those
  bool warned_above_budget = false, warned_thrashing = false;

  // The present state is the peak.
  void set_peak() {
    peak_live_bytes = arena.footprint().live_bytes;
    const std::int64_t small = arena.stats().allocated_bytes[arena::kSmall].current;
    peak_small_bytes = static_cast<std::size_t>(small);
  }
  bool frees_on_thread() const { return place.context != nullptr; }
};

// Of ordinals; bit n is device n.
using DeviceMask = std::uint32_t;
static_assert(kMaxDevices <= 32);

inline DeviceMask mask_of(int ordinal) {
  return DeviceMask{1} << ordinal;
}
// Calls `act` with each ordinal, in order.
template <class Act>
void each_ordinal(DeviceMask mask, Act act) {
  for (; mask != 0; mask &= mask - 1) act(std::countr_zero(mask));
}

// A block that was released while another thread had the lock.
struct Released {
  void* block;
  Released* before;
};

// Never destroyed. Order of locks: the registry's, those of devices by ordinal, then those that are
// taken for a moment (the range table's, the recorder's, that of scopes, that of torch's history).
struct Slot {
  std::mutex mutex;
  std::unique_ptr<Device> device;  // null where nothing was allocated yet
  std::uint64_t allocs = 0, frees = 0, ooms = 0;
  unsigned waiting = 0;  // threads that wait for the device without the lock: it has to stay

  // Left to the next who takes the lock: released blocks, the newest first, and ends of steps.
  std::atomic<Released*> released{nullptr};
  std::atomic<unsigned> steps{0};
};

}  // namespace umem::runtime
