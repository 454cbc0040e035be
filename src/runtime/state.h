// Everything that the runtime joins, under one lock. One object, never destroyed.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "arena/arena.h"
#include "base/options.h"
#include "driver/table.h"
#include "managed/range_table.h"
#include "residency/engine.h"
#include "runtime/accounts.h"
#include "runtime/alloc.h"
#include "runtime/ballast.h"
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
  arena::Arena arena;
  residency::Engine engine;
  std::size_t peak_live_bytes = 0;  // since the last reset
  std::size_t max_live_bytes = 0;   // since the start: what the cache may hold
  bool warned_larger_than_budget = false;
};

struct State {
  std::mutex mutex;
  std::atomic<bool> accepting{false};  // hands out memory and observes
  std::atomic<bool> forked{false};     // a child of a process that used a GPU: touches nothing
  std::atomic<int> captures{0};        // between capture_begin and capture_end
  driver::Driver driver;
  managed::RangeTable ranges{driver.table};
  Options options;
  // By ordinal; null where nothing was allocated yet. They stay until a stop that finds no live
  // block.
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<Requested> requested;  // by ordinal
  Stats counts;                      // allocs, frees, ooms, steps; the rest is read when asked
  Pins pins;
  std::uint64_t last_pin_number = 0;             // given to pins and exemptions
  std::vector<residency::Exemption> exemptions;  // of every device, opened or not
  std::vector<std::size_t> workspace_sizes;      // the same
  Scopes scopes;
  Listener listener = nullptr;
  std::atomic<void (*)()> step_listener{nullptr};
  std::atomic<VictimCallback> victim_callback{nullptr};
  std::optional<bool> managed;  // whether the driver's devices can have managed memory

  bool open() const { return !devices.empty() && !forked; }
  Device* device(int ordinal) const {
    const auto index = static_cast<std::size_t>(ordinal);
    return index < devices.size() ? devices[index].get() : nullptr;
  }
  Requested& requested_of(int ordinal) {
    const auto index = static_cast<std::size_t>(ordinal);
    if (requested.size() <= index) requested.resize(index + 1);
    return requested[index];
  }
  // Of a range of umem's.
  Device& owner(managed::RangeId id) const {
    return *(devices.size() == 1 ? devices.front()
                                 : devices[static_cast<std::size_t>(ranges[id].device)]);
  }
  // Calls `act` with every device that was opened.
  template <class Act>
  void each(Act act) const {
    if (forked) return;
    for (const std::unique_ptr<Device>& device : devices)
      if (device) act(*device);
  }
  // Blocks are alive, or in use on a stream or by an op: the devices have to stay.
  bool busy() const {
    bool found = false;
    each([&](Device& device) {
      found = found || device.arena.stats().active[arena::kAll].current > 0 ||
              device.engine.ledger().op_pinned_bytes() > 0;
    });
    return found;
  }
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

// With the lock held.
Result<void*> allocate_locked(State& s, std::size_t bytes, int device, cu::CUstream stream, Op* op);
void retire_reclaimed(Device& device);
// Waits for the device, after which no stream uses a block, and gives back what is cached.
Status settle(State& s, Device& device);
Status trim_locked(Device& device, std::size_t keep_bytes);
Status drop_idle_layout(Device& device);  // layouts.cpp
Status out_of_memory(const Device& device, Code code, std::size_t bytes, const std::string& why);
void pin(Op& op, managed::RangeId id);

// victim_callback.cpp: calls it where bytes are short, with the lock given up meanwhile: nothing
// that was read under it holds afterwards. The answer holds until it is forgotten.
void ask_victims_for_inputs(State& s, const void* const* inputs, std::size_t count,
                            std::unique_lock<std::mutex>& guard);
void ask_victims_for_block(State& s, std::size_t bytes, int device,
                           std::unique_lock<std::mutex>& guard);
void forget_victims(State& s);

// pins.cpp, with the lock held: ends all pins, or those inside a block that is released.
void end_pins(State& s);
void end_pins(State& s, const void* block, std::size_t bytes);

// devices.cpp, with the lock held: opens the driver for the options; the device, at its first use;
// gives all back.
Status open_driver(State& s, const Options& options);
Result<Device*> open_device(State& s, int ordinal);
Status close_devices(State& s);
// What a device with these options may hold.
Status check_limits(const Options& options);
residency::Limits limits_of(State& s, const Options& options, int ordinal);
// The status for a caller across the border, with a message that lives as Failure says.
void fail(Failure* error, const Status& status);

}  // namespace umem::runtime
