#include "runtime/runtime.h"

#include <pthread.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "driver/memory_info.h"
#include "engine/watchdog.h"
#include "policy/registry.h"
#include "runtime/cache.h"
#include "runtime/devices.h"
#include "runtime/op_use.h"
#include "runtime/pinned.h"
#include "runtime/recorder_lock.h"
#include "runtime/reports.h"
#include "runtime/settle.h"
#include "soft/device.h"

namespace umem::runtime {
namespace {

Status check_options(const Options& options) {
  if (options.device == "soft" || options.budget_bytes > 0)
    UMEM_RETURN_IF_ERROR(check_limits(options));
  if (!policy::find(options.policy)) {
    std::string known;
    for (const char* name : policy::names()) known += std::string(known.empty() ? "" : ", ") + name;
    return {Code::kInvalidArgument, "unknown policy '" + options.policy + "'; allowed: " + known};
  }
  return {};
}

// True if the options agree in all that live blocks depend on, which a restart must not change.
bool same_device(const Options& a, const Options& b) {
  Options as_a = b;  // except for options that a restart may change
  as_a.budget_bytes = a.budget_bytes;
  as_a.budget_percent = a.budget_percent;
  as_a.host_budget_bytes = a.host_budget_bytes;
  as_a.min_swap_bytes = a.min_swap_bytes;
  as_a.floor_bytes = a.floor_bytes;
  as_a.disk_bytes_a_day = a.disk_bytes_a_day;
  as_a.policy = a.policy;
  as_a.watchdog_s = a.watchdog_s;
  return as_a == a;
}

// Calls `act` with the runtime's mutexes in lock order.
template <class Act>
void each_mutex(State& s, Act act) {
  act(s.registry);
  for (Slot& slot : s.slots) act(slot.mutex);
  act(s.recorder);
  act(s.faults_mutex);
}

void lock_for_fork() {
  State& s = state();
  each_mutex(s, [](std::mutex& mutex) { mutex.lock(); });
  s.ranges.lock_for_fork();
  s.scope_names.lock_for_fork();
}

void unlock_after_fork() {
  State& s = state();
  s.scope_names.unlock_after_fork();
  s.ranges.unlock_after_fork();
  each_mutex(s, [](std::mutex& mutex) { mutex.unlock(); });
}

// In a forked child: other threads' ops and waits end in the parent.
void keep_own_ops(State& s) {
  s.operating = 0;
  for (const Op* op = t_op; op; op = op->parent) s.operating += op->operating ? 1 : 0;
  std::vector<managed::RangeId> pinned;
  for (const Op* op = t_op; op; op = op->parent)
    pinned.insert(pinned.end(), op->pinned, op->pinned + op->n_pinned);
  each_lock(s, [&](DeviceLock& lock) {
    lock.slot().waiting = 0;
    lock.device()->engine.ledger().set_op_pins(pinned);
  });
}

// A forked child gets a consistent copy; if a GPU was in use, a copy that touches nothing.
// Registered after the software device's handlers, and therefore locked before them, which is the
// lock order. A process that began with a GPU may open a software device later.
void register_fork_handlers() {
  static std::once_flag once;
  std::call_once(once, [] {
    soft::register_fork_handlers();
    pthread_atfork(&lock_for_fork, &unlock_after_fork, [] {
      unlock_after_fork();
      State& s = state();
      trace::recorder().leave_to_parent();
      if (s.driver.kind == driver::Kind::kCuda && s.open()) s.forked = true;
      keep_own_ops(s);
    });
  });
}

// Requires the registry's lock, like the functions below.
void forget_device_budgets(State& s) {
  for (Requested& requested : s.requested) requested.budget_bytes = 0;
}

Status open_locked(State& s, const Options& options) {
  register_fork_handlers();
  UMEM_RETURN_IF_ERROR(open_driver(s, options));
  s.last = {};
  s.steps = s.plans_rolled_back = s.thrashed_bytes = 0;
  s.steps_given = false;
  s.ranges.forget_cuts();
  {
    const std::lock_guard lock(s.faults_mutex);
    s.faults_of.clear();
  }
  for (Slot& slot : s.slots) {
    const DeviceLock lock(slot);
    slot.allocs = slot.frees = slot.ooms = 0;
  }
  s.options = options;
  s.managed.reset();  // found out for this backing
  engine::Watchdog::the().set_patience(options.watchdog_s);
  s.faults_in_process = s.driver.kind == driver::Kind::kSoft && options.backed;
  s.end_operation = options.backed ? s.driver.end_operation : nullptr;
  forget_device_budgets(s);
  if (s.driver.kind == driver::Kind::kCuda) return {};  // opened by the first allocation
  DeviceLock lock(s.slot(0));
  return open_device(s, lock, 0);
}

// The counters stay readable until the next start.
Status close_locked(State& s, const HeldDevices& all) {
  Stats last = last_stats(s, all);
  UMEM_RETURN_IF_ERROR(close_devices(s));
  s.last = last;
  return {};
}

// A software device of unspecified size has as many frames as the budget.
Status fit_device(State& s, const Options& options) {
  if (!s.driver.resize || options.device_bytes != 0) return {};
  return s.driver.resize(options.budget_bytes);
}

// `finds`: a budget that the options leave to the device is found now.
Status set_limits(State& s, Device& device, Options options, bool finds) {
  if (finds && options.budget_bytes == 0) {
    // A GPU's driver keeps the frames of what is evicted, until others need them.
    Result<driver::MemoryInfo> memory = driver::memory_info(s.driver.table, device.place);
    if (!memory.ok()) return memory.take_status();
    device.engine.observe_memory(memory.value().free_bytes);
    const std::size_t held = device.engine.attached_bytes() + device.engine.limits().outside_bytes;
    UMEM_RETURN_IF_ERROR(resolve_budget(s, device.place, held, options));
  }
  return device.engine.set_limits(limits_of(s, options, device.place.device));
}

// The device grows before the limits do and shrinks after them; if one is refused, all are
// unchanged.
Status apply_limits(State& s, const Options& options, bool finds = false) {
  const bool grows = options.budget_bytes > s.options.budget_bytes;
  if (grows) UMEM_RETURN_IF_ERROR(fit_device(s, options));
  std::vector<engine::Limits> before;
  FirstError error;
  each_device(s, [&](Device& device) {
    before.push_back(device.engine.limits());
    error.keep(set_limits(s, device, options, finds));
  });
  if (error.ok() && !grows) error.keep(fit_device(s, options));
  if (!error.ok()) {
    auto limits = before.begin();
    each_device(s, [&](Device& device) {
      const Status back = device.engine.set_limits(*limits++);
      (void)back;  // the caller is told the first error
    });
    if (grows) UMEM_RETURN_IF_ERROR(fit_device(s, s.options));
    return error.take();
  }
  const std::string policy = s.options.policy;
  s.options = options;
  s.options.policy = policy;  // changed by set_policy only
  return {};
}

}  // namespace

// Returns the options with the share of the budget that an open device has given to pages on their
// way to and from the disk.
static Options with_staging(Options options, std::size_t staging) {
  const auto keep = [&](std::size_t& bytes) {
    const std::size_t both = bytes + options.staging_bytes;
    if (bytes > 0) bytes = both - std::min(both, staging);
  };
  keep(options.device_bytes);
  keep(options.budget_bytes);
  options.staging_bytes = staging;
  return options;
}

// Requires the registry's lock. Restarts with the devices that live blocks keep open.
static Status resume(State& s, const Options& options) {
  if (!same_device(options, s.options))
    return {Code::kBadState, "tensors of the previous session are still alive on the device '" +
                                 s.options.device + ":" + s.options.profile +
                                 "', or a graph is being captured; free them, or keep the device "
                                 "options"};
  UMEM_RETURN_IF_ERROR(check_options(options));
  each_device(s, [](Device& device) { device.engine.finish_moves(); });
  forget_device_budgets(s);
  UMEM_RETURN_IF_ERROR(apply_limits(s, options, true));
  each_device(s, [&](Device& device) { device.engine.set_policy(*policy::find(options.policy)); });
  s.options = options;
  s.steps_given = false;
  engine::Watchdog::the().set_patience(options.watchdog_s);
  reset_peaks(s);  // a new session has its own peaks
  return {};
}

static Status settle_all(State& s) {
  if (s.captures > 0) return {};  // a wait for the device would break the capture
  FirstError error;
  each_lock(s, [&](DeviceLock& lock) { error.keep(settle(s, lock)); });
  return error.take();
}

Status start(const Options& options) {
  UMEM_RETURN_IF_ERROR(check_options(options));
  State& s = state();
  // Memory may be in use on streams that umem did not see while it was off.
  if (!s.accepting && !s.forked) UMEM_RETURN_IF_ERROR(settle_all(s));
  const std::lock_guard registry(s.registry);
  if (s.forked)
    return {Code::kBadState, "the process was forked after umem had used a GPU; start it by spawn"};
  if (s.accepting)
    return with_staging(options, s.options.staging_bytes) == s.options
               ? Status()
               : Status(Code::kBadState, "umem is running with other options; disable it first");
  s.unmanaged.begin();
  if (s.open()) {
    const HeldDevices all(s, s.opened);
    all.each([](Device& device) { retire_reclaimed(device); });
    if (!all.busy()) UMEM_RETURN_IF_ERROR(close_locked(s, all));
  }
  UMEM_RETURN_IF_ERROR(s.open() ? resume(s, with_staging(options, s.options.staging_bytes))
                                : open_locked(s, options));
  s.accepting = true;
  return {};
}

Status stop() {
  State& s = state();
  {
    const std::lock_guard registry(s.registry);
    s.accepting = false;
    each_device(s, [&](Device& device) {
      end_pins(s, device);
      device.engine.end_moves();
    });
    s.exemptions.clear();
    for (const trace::Sink sink : {trace::kPlan, trace::kFile}) RecorderLock(s)->stop(sink);
  }
  UMEM_RETURN_IF_ERROR(settle_all(s));
  const std::lock_guard registry(s.registry);
  const HeldDevices all(s, s.opened);
  // Another thread may have started it again.
  return s.accepting || all.empty() || all.busy() ? Status() : close_locked(s, all);
}

bool running() {
  return state().accepting;
}

Options current_options() {
  State& s = state();
  const std::lock_guard registry(s.registry);
  return s.options;
}

Status set_budget(std::size_t device_bytes, std::size_t host_bytes) {
  State& s = state();
  const std::lock_guard registry(s.registry);
  if (!s.usable()) return not_running(s);
  Options options = s.options;
  options.budget_bytes = device_bytes;
  options.host_budget_bytes = host_bytes;
  UMEM_RETURN_IF_ERROR(check_options(options));
  const auto before = s.requested;
  forget_device_budgets(s);  // the new budget is for all devices
  Status status = apply_limits(s, options);
  if (!status.ok()) s.requested = before;
  return status;
}

Status set_policy(const std::string& name) {
  State& s = state();
  const std::lock_guard registry(s.registry);
  if (!s.usable()) return not_running(s);
  Options options = s.options;
  options.policy = name;
  UMEM_RETURN_IF_ERROR(check_options(options));
  each_device(s, [&](Device& device) { device.engine.set_policy(*policy::find(name)); });
  s.options = options;
  return {};
}

Status trim() {
  FirstError error;
  each_lock(state(), [&](DeviceLock& lock) { error.keep(release_all_cached(lock)); });
  return error.take();
}

driver::Driver* current_driver() {
  State& s = state();
  return s.open() ? &s.driver : nullptr;
}

}  // namespace umem::runtime
