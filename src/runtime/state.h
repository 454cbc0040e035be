// Everything that the runtime joins. One object, never destroyed. What is a device's is under that
// device's lock (device_lock.h), the rest under the registry's, but for what has atomics.
#pragma once
#include <array>
#include <atomic>
#include <bit>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena/arena.h"
#include "base/options.h"
#include "driver/table.h"
#include "managed/freer.h"
#include "managed/range_table.h"
#include "residency/engine.h"
#include "runtime/accounts.h"
#include "runtime/alloc.h"
#include "runtime/ballast.h"
#include "runtime/device_lock.h"
#include "runtime/ops.h"
#include "runtime/pins.h"
#include "runtime/runtime.h"
#include "runtime/victim_callback.h"

namespace umem::runtime {

// What was asked of one device alone, open or not; 0: nothing.
struct Requested {
  std::size_t budget_bytes = 0, outside_bytes = 0;
};

// One device that umem serves.
struct Device {
  Device(driver::Driver& driver, managed::RangeTable& ranges, driver::Place place, bool managed,
         residency::Limits limits, std::unique_ptr<residency::Policy> policy);

  driver::Place place;
  std::unique_ptr<Ballast> ballast;  // of a device that is to be smaller; given back last
  // Memory of a GPU goes back to its driver on a thread; on the software device at once.
  managed::Freer freer;
  arena::Arena arena;
  residency::Engine engine;
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

struct State {
  std::mutex registry;                 // of what follows, up to `slots`
  std::atomic<bool> accepting{false};  // hands out memory and observes
  std::atomic<bool> forked{false};     // a child of a process that used a GPU: touches nothing
  std::atomic<int> captures{0};        // between capture_begin and capture_end
  driver::Driver driver;               // changed while no device is open
  Options options;
  std::array<Requested, kMaxDevices> requested;  // by ordinal
  Stats last;                                    // what was counted when the devices were closed
  std::vector<residency::Exemption> exemptions;  // of every device, opened or not
  std::vector<std::size_t> workspace_sizes;      // the same
  std::optional<bool> managed;  // whether the driver's devices can have managed memory

  // By ordinal. A device stays until a stop that finds no live block.
  std::array<Slot, kMaxDevices> slots;
  std::atomic<DeviceMask> opened{0};  // changed with the registry's and the device's lock

  managed::RangeTable ranges{driver.table};
  std::mutex recorder;  // trace::recorder()'s
  ScopeNames scope_names;
  std::atomic<double> memory_fraction{1};  // of each device's memory, for a budget that is found
  std::atomic<bool> logs_transfers{false};
  std::atomic<bool> faults_in_process{false};  // page faults of the software device
  std::atomic<driver::Operation (*)()> end_operation{nullptr};  // the driver's
  std::atomic<int> operating{0};  // ops that use memory, on all threads
  std::atomic<std::uint64_t> thrashed_bytes{0};
  std::mutex faults_mutex;                                   // no other lock is taken under it
  std::unordered_map<std::string, std::uint64_t> faults_of;  // by the op's name
  std::atomic<std::uint64_t> steps{0}, plans_rolled_back{0};
  std::atomic<bool> steps_given{false};           // by the program
  std::atomic<std::uint64_t> last_pin_number{0};  // given to pins and exemptions
  std::atomic<Listener> listener{nullptr};
  std::atomic<void (*)()> step_listener{nullptr};
  std::atomic<VictimCallback> victim_callback{nullptr};

  // Of a device's memory, what a budget that is found may take.
  std::size_t allowed_bytes(std::size_t total_bytes) const {
    return static_cast<std::size_t>(static_cast<double>(total_bytes) * memory_fraction);
  }
  bool open() const { return opened != 0 && !forked; }
  // Something can be asked of umem: it is on, or has memory. A GPU is opened at its first use.
  bool usable() const { return (accepting || opened != 0) && !forked; }
  static bool has_slot(int ordinal) { return ordinal >= 0 && ordinal < kMaxDevices; }
  Slot& slot(int ordinal) { return slots[static_cast<std::size_t>(ordinal)]; }
  // Of the device that the range is of.
  Slot& slot_of(managed::RangeId id) { return slot(ranges.device_of(id)); }
  // Calls `act` with the lock of the device that has the address, and the id of its piece. What
  // that returned, or false where no range has the address.
  template <class Act>
  bool with_range(const void* ptr, Act act) {
    const managed::RangeId found = ranges.find(ptr);
    if (found == managed::kNoRange) return false;
    DeviceLock lock(slot_of(found));
    const managed::RangeId id = ranges.find(ptr);  // under the lock: it may have gone
    return id != managed::kNoRange && &slot_of(id) == &lock.slot() && act(lock, id);
  }
  // Calls `act` with the lock of every device that was opened, one after the other.
  template <class Act>
  void each_lock(Act act) {
    if (forked) return;
    each_ordinal(opened, [&](int ordinal) {
      DeviceLock lock(slot(ordinal));
      if (lock.device()) act(lock);
    });
  }
  // The same with every device.
  template <class Act>
  void each(Act act) {
    each_lock([&](DeviceLock& lock) { act(*lock.device()); });
  }
};

// The locks of several devices, taken in the order of ordinals, and none in a forked child that
// touches nothing.
class HeldDevices {
 public:
  HeldDevices(State& s, DeviceMask mask);
  // Of which the range is; null: none that is held.
  Device* of(managed::RangeId id) const { return by_ordinal_[index(state_.ranges.device_of(id))]; }
  template <class Act>
  void each(Act act) const {
    for (const DeviceLock& lock : locks_) act(*lock.device());
  }
  bool empty() const { return locks_.empty(); }
  // Blocks are alive, or in use on a stream or by an op: the devices have to stay.
  bool busy() const;

 private:
  static std::size_t index(int ordinal) { return static_cast<std::size_t>(ordinal); }
  State& state_;
  std::vector<DeviceLock> locks_;
  std::array<Device*, kMaxDevices> by_ordinal_{};
};

// The top of the calling thread's op stack (ops.cpp).
extern constinit thread_local Op* t_op;

// Inline, and without a guard once made: every op asks.
extern constinit State* g_state;
State& make_state();
inline State& state() {
  State* made = __atomic_load_n(&g_state, __ATOMIC_ACQUIRE);
  return made ? *made : make_state();
}

// memory.cpp, with the device's lock. Those with a DeviceLock may wait for the device, and do so
// without the lock.
Result<void*> allocate_on(State& s, DeviceLock& lock, std::size_t bytes, cu::CUstream stream,
                          Op* op);
void retire_reclaimed(Device& device);
// Waits for the device, after which no stream uses a block, and gives back what is cached.
Status settle(State& s, DeviceLock& lock);
// Gives cached memory back to the driver. On a GPU it is freed later: see `wait_until_freed`.
Status trim_cache(Device& device, std::size_t keep_bytes);
// The driver has all of it; its reason where it refused some.
Status wait_until_freed(DeviceLock& lock);
// All of it.
Status release_all_cached(DeviceLock& lock);
Status drop_idle_layout(Device& device);  // layouts.cpp
Status out_of_memory(const Device& device, Code code, std::size_t bytes, const std::string& why);
void pin(Op& op, Device& device, managed::RangeId id);
// Calls `act` with the pieces that the input uses of the range of `id`, which is its storage's.
template <class Act>
void each_used(const managed::RangeTable& ranges, const Input& input, managed::RangeId id,
               Act act) {
  if (input.bytes == 0 || ranges.whole(id))  // nearly always
    ranges.each_piece(id, act);
  else
    ranges.each_piece_in(input.begin(), input.bytes, act);
}
// Cuts the range into the smaller pieces that there are in ranges of its size by now, if it can be.
void cut_as_others(State& s, Device& device, managed::RangeId id);
// Once for each device: `what` uses `bytes` at once, and they do not fit.
void warn_above_budget(Device& device, const char* what, std::size_t bytes);
// Counts the op, and warns, if what it and the ops around it use is above the budget.
void note_above_budget(Device& device, Op& op);

// victim_callback.cpp: calls it where bytes are short, with the lock given up meanwhile: nothing
// that was read under it holds afterwards. The answer holds until it is forgotten.
void ask_victims_for_inputs(State& s, const Input* inputs, std::size_t count, DeviceLock& lock);
void ask_victims_for_block(State& s, std::size_t bytes, DeviceLock& lock);

// pins.cpp: ends all pins of a device, or those inside a block that is released.
void end_pins(State& s, Device& device);
void end_pins(State& s, Device& device, const void* block, std::size_t bytes);
// Take the pins within a range off its units, and put them on the units that it has then.
void take_pins_off(const State& s, Device& device, managed::MemSpan range);
void put_pins_on(const State& s, Device& device, managed::MemSpan range);

// devices.cpp, with the registry's lock: opens the driver for the options; the device, at its first
// use; gives all back, with all devices' locks.
Status open_driver(State& s, const Options& options);
Status open_device(State& s, DeviceLock& lock, int ordinal);
Status close_devices(State& s);
// Without the registry's lock, and with the device's, which is given up meanwhile where it is not
// open.
Status ensure_open(State& s, DeviceLock& lock, int ordinal);
// What a device with these options may hold.
Status check_limits(const Options& options);
// With the registry's lock, and the device's where there is one.
residency::Limits limits_of(State& s, const Options& options, int ordinal);
// The status for a caller across the border, with a message that lives as Failure says.
void fail(Failure* error, const Status& status);
Status not_running(const State& s);
Status no_such_device(int ordinal);

}  // namespace umem::runtime
