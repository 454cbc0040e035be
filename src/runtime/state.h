// Everything that the runtime joins. One object, never destroyed. What is a device's is under that
// device's lock (device_lock.h), the rest under the registry's, but for what has atomics.
#pragma once
#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena/stats.h"
#include "base/options.h"
#include "base/status.h"
#include "driver/table.h"
#include "managed/range_table.h"
#include "runtime/device.h"
#include "runtime/scope_names.h"
#include "runtime/shortage.h"
#include "runtime/stats.h"

namespace umem::runtime {

// What was asked of one device alone, open or not; 0: nothing.
struct Requested {
  std::size_t budget_bytes = 0, outside_bytes = 0;
};

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
  std::atomic<arena::Listener> listener{nullptr};
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
};

// Inline, and without a guard once made: every op asks.
extern constinit State* g_state;
State& make_state();
inline State& state() {
  State* made = __atomic_load_n(&g_state, __ATOMIC_ACQUIRE);
  return made ? *made : make_state();
}

// Why a request is refused: umem is off, or does not serve the device.
Status not_running(const State& s);
Status no_such_device(int ordinal);

}  // namespace umem::runtime
