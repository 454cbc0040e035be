#include "runtime/runtime.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "base/thread_role.h"
#include "policy/registry.h"
#include "residency/watchdog.h"
#include "runtime/record.h"
#include "runtime/state.h"
#include "soft/device.h"
#include "soft/fault_handler.h"
#include "soft/interpose.h"
#include "trace/recorder.h"

namespace umem::runtime {
namespace {

Status check_options(const Options& options) {
  if (options.device == "soft" || options.budget_bytes > 0)
    UMEM_RETURN_IF_ERROR(check_limits(options));
  if (!policy::make(options.policy)) {
    std::string known;
    for (const char* name : policy::names()) known += std::string(known.empty() ? "" : ", ") + name;
    return {Code::kInvalidArgument, "unknown policy '" + options.policy + "'; allowed: " + known};
  }
  return {};
}

// What live blocks were laid out for, and so what a restart may not change.
bool same_device(const Options& a, const Options& b) {
  Options as_a = b;  // but for what a restart may change
  as_a.budget_bytes = a.budget_bytes;
  as_a.budget_percent = a.budget_percent;
  as_a.host_budget_bytes = a.host_budget_bytes;
  as_a.min_swap_bytes = a.min_swap_bytes;
  as_a.floor_bytes = a.floor_bytes;
  as_a.policy = a.policy;
  as_a.watchdog_s = a.watchdog_s;
  return as_a == a;
}

// Those of devices and of what is taken under them, in their order.
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

// A forked child gets a consistent copy; where a GPU was in use, one that touches nothing.
// Registered after the device's handlers, and so locked before them: the order in which every call
// takes the locks.
void register_fork_handlers() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(&lock_for_fork, &unlock_after_fork, [] {
      unlock_after_fork();
      State& s = state();
      trace::recorder().leave_to_parent();
      if (s.driver.kind == driver::Kind::kCuda && s.open()) s.forked = true;
      s.operating = 0;  // the ops of other threads end in the parent
      for (const Op* op = t_op; op; op = op->parent) s.operating += op->operating ? 1 : 0;
    });
  });
}

// With the registry's lock, as what follows.
void forget_device_budgets(State& s) {
  for (Requested& requested : s.requested) requested.budget_bytes = 0;
}

Status open_locked(State& s, const Options& options) {
  UMEM_RETURN_IF_ERROR(open_driver(s, options));
  register_fork_handlers();
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
  residency::Watchdog::the().set_patience(options.watchdog_s);
  s.faults_in_process = s.driver.kind == driver::Kind::kSoft && options.backed;
  s.end_operation = options.backed ? s.driver.end_operation : nullptr;
  forget_device_budgets(s);
  if (s.driver.kind == driver::Kind::kCuda) return {};  // at the first allocation
  DeviceLock lock(s.slot(0));
  return open_device(s, lock, 0);
}

void add_device(const State& s, Device& device, Stats& result) {
  const arena::Footprint footprint = device.arena.footprint();
  const residency::Ledger& ledger = device.engine.ledger();
  const residency::Counters& moved = device.engine.counters();
  result.budget_bytes += device.engine.limits().budget_bytes;
  result.live_bytes += footprint.live_bytes;
  result.peak_live_bytes += device.peak_live_bytes;
  result.peak_small_bytes += device.peak_small_bytes;
  result.cached_bytes += footprint.cached_bytes;
  result.attached_bytes += device.engine.attached_bytes();
  result.dropped_bytes += ledger.dropped_bytes();
  result.bytes_discarded += moved.bytes_discarded;
  result.evictions += moved.evictions;
  result.prefetches += moved.prefetches;
  result.prefetched_unused_bytes += moved.prefetched_unused_bytes;
  result.pinned_bytes += ledger.user_pinned_bytes();
  result.asleep_bytes += device.engine.sleep().asleep_bytes();
  result.capture_skips += moved.capture_skips;
  result.advice_ignored += moved.advice_ignored;
  result.ops_above_budget += device.ops_above_budget;
  result.largest_op_bytes =
      std::max<std::uint64_t>(result.largest_op_bytes, device.largest_op_bytes);
  result.plan_hits += moved.plan_hits;
  result.plan_misses += moved.plan_misses;
  result.zero_copy_bytes += moved.zero_copy_bytes;
  result.hook_errors += device.engine.hook_errors() + device.freer.failures();
  if (s.driver.telemetry) return;
  result.resident_bytes += ledger.resident_bytes();
  result.peak_resident_bytes += ledger.peak_resident_bytes();
  result.host_bytes += ledger.host_bytes();
  result.peak_host_bytes += ledger.peak_host_bytes();
  result.bytes_in += moved.bytes_in;
  result.bytes_out += moved.bytes_out;
}

void add_telemetry(const State& s, Stats& result) {
  if (!s.driver.telemetry) return;  // else it is a device that tells what really happened
  const driver::Telemetry now = s.driver.telemetry();
  result.resident_bytes = now.resident_bytes;
  result.peak_resident_bytes = now.peak_resident_bytes;
  result.host_bytes = now.host_bytes;
  result.peak_host_bytes = now.peak_host_bytes;
  result.bytes_in = now.bytes_in + now.fault_bytes_in;
  result.bytes_out = now.bytes_out + now.pressure_bytes_out;
  result.faults = now.faults;
  result.stall_us = now.stall_us;
  result.zero_copy_bytes += s.thrashed_bytes;
}

// Of devices that were closed too.
void add_slots(State& s, Stats& result) {
  for (Slot& slot : s.slots) {
    const DeviceLock lock(slot);
    result.allocs += slot.allocs;
    result.frees += slot.frees;
    result.ooms += slot.ooms;
  }
}

// What was counted stays readable until the next start.
Status close_locked(State& s, const HeldDevices& all) {
  Stats last;
  last.host_budget_bytes = s.options.host_budget_bytes;
  all.each([&](Device& device) { add_device(s, device, last); });
  add_telemetry(s, last);
  UMEM_RETURN_IF_ERROR(close_devices(s));
  s.last = last;
  return {};
}

// The frames of a software device follow the budget where its size was left open.
Status fit_device(State& s, const Options& options) {
  if (!s.driver.resize || options.device_bytes != 0) return {};
  return s.driver.resize(options.budget_bytes);
}

Status set_all_limits(State& s, const Options& options) {
  FirstError error;
  s.each(
      [&](Device& d) { error.keep(d.engine.set_limits(limits_of(s, options, d.place.device))); });
  return error.take();
}

// The device grows before the limits and shrinks after them; a refusal leaves both as they were.
Status apply_limits(State& s, const Options& options) {
  const bool grows = options.budget_bytes > s.options.budget_bytes;
  if (grows) UMEM_RETURN_IF_ERROR(fit_device(s, options));
  Status status = set_all_limits(s, options);
  if (status.ok() && !grows) status = fit_device(s, options);
  if (!status.ok()) {
    UMEM_RETURN_IF_ERROR(set_all_limits(s, s.options));
    if (grows) UMEM_RETURN_IF_ERROR(fit_device(s, s.options));
    return status;
  }
  const std::string policy = s.options.policy;
  s.options = options;
  s.options.policy = policy;  // set_policy's part
  return {};
}

void reset_peaks(State& s) {
  s.each([](Device& device) {
    device.set_peak();
    device.engine.ledger().reset_peaks();
  });
  if (s.driver.reset_peak) s.driver.reset_peak();
}

}  // namespace

HeldDevices::HeldDevices(State& s, DeviceMask mask) : state_(s) {
  if (s.forked) return;
  each_ordinal(mask, [&](int ordinal) {
    DeviceLock lock(s.slot(ordinal));
    if (!lock.device()) return;
    by_ordinal_[index(ordinal)] = lock.device();
    locks_.push_back(std::move(lock));
  });
}

bool HeldDevices::busy() const {
  return std::any_of(locks_.begin(), locks_.end(), [](const DeviceLock& lock) {
    Device& device = *lock.device();
    return lock.slot().waiting > 0 || device.arena.stats().active[arena::kAll].current > 0 ||
           device.engine.ledger().op_pinned_bytes() > 0;
  });
}

constinit State* g_state = nullptr;

State& make_state() {
  static State* all = [] {
    auto* made = new State;
    __atomic_store_n(&g_state, made, __ATOMIC_RELEASE);
    return made;
  }();
  return *all;
}

// With the registry's lock: goes on with the devices that live blocks hold.
static Status resume(State& s, const Options& options) {
  if (!same_device(options, s.options))
    return {Code::kBadState, "tensors of the previous session are still alive on the device '" +
                                 s.options.device + ":" + s.options.profile +
                                 "'; free them, or keep the device options"};
  forget_device_budgets(s);
  UMEM_RETURN_IF_ERROR(apply_limits(s, options));
  s.each([&](Device& device) { device.engine.set_policy(policy::make(options.policy)); });
  s.options = options;
  residency::Watchdog::the().set_patience(options.watchdog_s);
  reset_peaks(s);  // a new session's peaks are its own
  return {};
}

Status start(const Options& options) {
  UMEM_RETURN_IF_ERROR(check_options(options));
  State& s = state();
  const std::lock_guard registry(s.registry);
  if (s.forked)
    return {Code::kBadState, "the process was forked after umem had used a GPU; start it by spawn"};
  if (s.accepting)
    return options == s.options
               ? Status()
               : Status(Code::kBadState, "umem is running with other options; disable it first");
  if (s.open()) {
    const HeldDevices all(s, s.opened);
    all.each([](Device& device) { retire_reclaimed(device); });
    if (!all.busy()) UMEM_RETURN_IF_ERROR(close_locked(s, all));
  }
  UMEM_RETURN_IF_ERROR(s.open() ? resume(s, options) : open_locked(s, options));
  s.accepting = true;
  return {};
}

Status stop() {
  State& s = state();
  {
    const std::lock_guard registry(s.registry);
    s.accepting = false;
    s.each([&](Device& device) {
      end_pins(s, device);
      device.engine.end_zero_copy();
    });
    s.exemptions.clear();
    for (const trace::Sink sink : {trace::kPlan, trace::kFile}) RecorderLock(s)->stop(sink);
  }
  FirstError error;
  s.each_lock([&](DeviceLock& lock) { error.keep(settle(s, lock)); });
  UMEM_RETURN_IF_ERROR(error.take());
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
  forget_device_budgets(s);  // it is for all of them now
  Status status = apply_limits(s, options);
  if (status.ok()) return {};
  s.requested = before;
  const Status back = set_all_limits(s, s.options);
  (void)back;  // the refusal is what the caller has to know
  return status;
}

Status set_policy(const std::string& name) {
  State& s = state();
  const std::lock_guard registry(s.registry);
  if (!s.usable()) return not_running(s);
  Options options = s.options;
  options.policy = name;
  UMEM_RETURN_IF_ERROR(check_options(options));
  s.each([&](Device& device) { device.engine.set_policy(policy::make(name)); });
  s.options = options;
  return {};
}

Stats stats() {
  State& s = state();
  std::unique_lock registry(s.registry);
  Stats result;
  if (s.open()) {
    result.host_budget_bytes = s.options.host_budget_bytes;
    // Nothing waits on a software device, whose figures are of one time.
    if (!s.driver.telemetry) registry.unlock();
    s.each([&](Device& device) { add_device(s, device, result); });
    if (registry) add_telemetry(s, result);
  } else {
    result = s.last;
  }
  add_slots(s, result);
  result.steps = s.steps;
  result.plans_rolled_back = s.plans_rolled_back;
  return result;
}

Result<Stats> device_stats(int ordinal) {
  State& s = state();
  if (!State::has_slot(ordinal)) return no_such_device(ordinal);
  std::unique_lock registry(s.registry);
  Stats result;
  result.host_budget_bytes = s.options.host_budget_bytes;
  const bool soft = s.driver.telemetry != nullptr;  // the one device, and its figures are of it
  if (!soft) registry.unlock();
  const DeviceLock lock(s.slot(ordinal));
  if (s.open() && lock.device()) {
    add_device(s, *lock.device(), result);
    if (soft) add_telemetry(s, result);
  }
  result.allocs = lock.slot().allocs;
  result.frees = lock.slot().frees;
  result.ooms = lock.slot().ooms;
  result.steps = s.steps;
  result.plans_rolled_back = s.plans_rolled_back;
  return result;
}

std::vector<int> opened_devices() {
  State& s = state();
  std::vector<int> ordinals;
  if (s.open() && !s.forked) each_ordinal(s.opened, [&](int o) { ordinals.push_back(o); });
  return ordinals;
}

std::vector<std::pair<std::string, std::uint64_t>> faults_by_operator() {
  State& s = state();
  std::vector<std::pair<std::string, std::uint64_t>> result;
  {
    const std::lock_guard lock(s.faults_mutex);
    result.assign(s.faults_of.begin(), s.faults_of.end());
  }
  std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  });
  return result;
}

void reset_peak_stats() {
  State& s = state();
  const std::lock_guard registry(s.registry);
  if (s.open()) reset_peaks(s);
}

Status trim() {
  FirstError error;
  state().each_lock([&](DeviceLock& lock) { error.keep(release_all_cached(lock)); });
  return error.take();
}

static void end_step(Device& device) {
  device.engine.step_ended();
  device.arena.step_ended();
}

void end_steps(Slot& slot) {
  for (unsigned left = slot.steps.exchange(0); left > 0; --left)
    if (slot.device && !state().forked) end_step(*slot.device);
}

// Where there are several devices each step ends on the next thread that uses the device: this one
// may have to come to what another device waits for.
static void step_devices(State& s) {
  if (s.forked) return;
  each_ordinal(s.opened, [&](int ordinal) { ++s.slot(ordinal).steps; });
  if (!std::has_single_bit(s.opened.load())) return;
  Slot& only = s.slot(std::countr_zero(s.opened.load()));
  if (const DeviceLock lock(only, std::try_to_lock); lock.held()) end_steps(only);
}

static void end_step(State& s) {
  if (s.captures > 0) return;  // what a graph captures does not run, and must not be waited for
  runs_steps();
  ++s.steps;
  step_devices(s);
  if (trace::recording()) RecorderLock(s)->step();
  if (s.open() && s.faults_in_process) {
    // Libraries loaded and handlers set since the last step must not hide page faults from us.
    soft::install_interposers();
    soft::install_fault_handler();
  }
  if (auto* listener = s.step_listener.load()) listener();
}

void step() noexcept {
  State& s = state();
  s.steps_given = true;
  end_step(s);
}

void guess_step() noexcept {
  State& s = state();
  if (!s.steps_given) end_step(s);
}

std::uint64_t steps() noexcept {
  return state().steps;
}

void set_step_listener(void (*listener)()) noexcept {
  state().step_listener = listener;
}

driver::Driver* current_driver() {
  State& s = state();
  return s.open() ? &s.driver : nullptr;
}

}  // namespace umem::runtime
