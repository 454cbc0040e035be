// The state of the runtime. One object, never destroyed. A device's state is guarded by the
// device's lock (device_lock.h), the rest by the registry's lock, except atomics.
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
#include "runtime/unmanaged.h"

namespace umem::runtime {

// Settings for a single device, open or not; 0: none.
struct Requested {
  std::size_t budget_bytes = 0, outside_bytes = 0;
};

struct State {
  std::mutex registry;                 // guards the members below, up to `slots`
  std::atomic<bool> accepting{false};  // hands out memory and observes
  std::atomic<bool> forked{false};     // the child of a process that used a GPU: touches nothing
  std::atomic<int> captures{0};        // between capture_begin and capture_end
  driver::Driver driver;               // changed while no device is open
  Options options;
  std::array<Requested, kMaxDevices> requested;  // by ordinal
  Stats last;                                    // statistics from when the devices were closed
  std::vector<residency::Exemption> exemptions;  // for every device, open or not
  std::vector<std::size_t> workspace_sizes;      // likewise
  std::optional<bool> managed;                   // false: plain device memory, nothing is evicted
  DeviceMask integrated = 0;                     // devices whose memory is the host's

  // By ordinal. A device stays open until a stop that finds no live block.
  std::array<Slot, kMaxDevices> slots;
  std::atomic<DeviceMask> opened{0};  // changed under the registry's and the device's lock

  managed::RangeTable ranges{driver.table};
  std::mutex recorder;  // guards trace::recorder()
  ScopeNames scope_names;
  std::atomic<double> memory_fraction{1};  // upper bound of budgets that are found at first use
  std::atomic<bool> logs_transfers{false};
  std::atomic<bool> faults_in_process{false};  // page faults of the software device
  std::atomic<driver::Operation (*)()> end_operation{nullptr};  // the driver's
  std::atomic<int> operating{0};  // ops that use memory, on all threads
  std::atomic<std::uint64_t> thrashed_bytes{0};
  std::mutex faults_mutex;                                   // no other lock is taken under it
  std::unordered_map<std::string, std::uint64_t> faults_of;  // by the op's name
  Unmanaged unmanaged;
  std::atomic<std::uint64_t> steps{0}, plans_rolled_back{0};
  std::atomic<bool> steps_given{false};           // by the program
  std::atomic<std::uint64_t> last_pin_number{0};  // numbers of pins and exemptions
  std::atomic<arena::Listener> listener{nullptr};
  std::atomic<void (*)()> step_listener{nullptr};
  std::atomic<VictimCallback> victim_callback{nullptr};

  // The part of a device's memory that the options leave to the process.
  std::size_t usable_bytes(std::size_t total_bytes) const {
    return options.device_bytes > 0 ? options.device_bytes : total_bytes;
  }
  // The upper bound of a budget that is found at first use.
  std::size_t allowed_bytes(std::size_t usable) const {
    return static_cast<std::size_t>(static_cast<double>(usable) * memory_fraction);
  }
  // Blocks are mapped: not where nothing can be evicted.
  bool mapped() const { return options.backing == "mapped" && managed.value_or(true); }
  bool open() const { return opened != 0 && !forked; }
  // True if umem is on, or still has memory. A GPU is opened at its first use.
  bool usable() const { return (accepting || opened != 0) && !forked; }
  static bool has_slot(int ordinal) { return ordinal >= 0 && ordinal < kMaxDevices; }
  Slot& slot(int ordinal) { return slots[static_cast<std::size_t>(ordinal)]; }
  // The slot of the range's device.
  Slot& slot_of(managed::RangeId id) { return slot(ranges.device_of(id)); }
};

// Inline and without an initialisation guard, because every op calls it.
extern constinit State* g_state;
State& make_state();
inline State& state() {
  State* made = __atomic_load_n(&g_state, __ATOMIC_ACQUIRE);
  return made ? *made : make_state();
}

// Errors: umem is off; umem does not serve the device.
Status not_running(const State& s);
Status no_such_device(int ordinal);

}  // namespace umem::runtime
