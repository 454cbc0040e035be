#include "runtime/runtime.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "policy/registry.h"
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
  return as_a == a;
}

// A forked child gets a consistent copy; where a GPU was in use, one that touches nothing.
// Registered after the device's handlers, and so locked before them: the order in which every call
// takes the two locks.
void register_fork_handlers() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); },
                   [] {
                     State& s = state();
                     s.mutex.unlock();
                     trace::recorder().leave_to_parent();
                     if (s.driver.kind == driver::Kind::kCuda && s.open()) s.forked = true;
                   });
  });
}

Status open_locked(State& s, const Options& options) {
  UMEM_RETURN_IF_ERROR(open_driver(s, options));
  register_fork_handlers();
  s.counts = {};
  s.options = options;
  for (Requested& requested : s.requested) requested.budget_bytes = 0;
  if (s.driver.kind == driver::Kind::kCuda) return {};  // at the first allocation
  return open_device(s, 0).take_status();
}

void add_device(const State& s, Device& device, Stats& result) {
  const arena::Footprint footprint = device.arena.footprint();
  const residency::Ledger& ledger = device.engine.ledger();
  const residency::Counters& moved = device.engine.counters();
  result.budget_bytes += device.engine.limits().budget_bytes;
  result.live_bytes += footprint.live_bytes;
  result.peak_live_bytes += device.peak_live_bytes;
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
  result.plan_hits += moved.plan_hits;
  result.plan_misses += moved.plan_misses;
  result.hook_errors += device.engine.hook_errors();
  if (s.driver.telemetry) return;
  result.resident_bytes += ledger.resident_bytes();
  result.peak_resident_bytes += ledger.peak_resident_bytes();
  result.host_bytes += ledger.host_bytes();
  result.peak_host_bytes += ledger.peak_host_bytes();
  result.bytes_in += moved.bytes_in;
  result.bytes_out += moved.bytes_out;
}

Stats stats_locked(const State& s) {
  Stats result = s.counts;
  if (!s.open()) return result;
  result.host_budget_bytes = s.options.host_budget_bytes;
  s.each([&](Device& device) { add_device(s, device, result); });
  if (s.driver.telemetry) {  // a device that tells what really happened
    const driver::Telemetry now = s.driver.telemetry();
    result.resident_bytes = now.resident_bytes;
    result.peak_resident_bytes = now.peak_resident_bytes;
    result.host_bytes = now.host_bytes;
    result.peak_host_bytes = now.peak_host_bytes;
    result.bytes_in = now.bytes_in + now.fault_bytes_in;
    result.bytes_out = now.bytes_out + now.pressure_bytes_out;
    result.faults = now.faults;
    result.stall_us = now.stall_us;
  }
  return result;
}

// What was counted stays readable until the next start.
Status close_locked(State& s) {
  const Stats last = stats_locked(s);
  UMEM_RETURN_IF_ERROR(close_devices(s));
  s.counts = last;
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

void reset_peaks_locked(State& s) {
  s.each([](Device& device) {
    device.peak_live_bytes = device.arena.footprint().live_bytes;
    device.engine.ledger().reset_peaks();
  });
  if (s.driver.reset_peak) s.driver.reset_peak();
}

}  // namespace

Status check_limits(const Options& options) {
  if (options.budget_bytes >= options.floor_bytes) return {};
  return {Code::kInvalidArgument, "budget " + format_bytes(options.budget_bytes) +
                                      " is below the floor of " +
                                      format_bytes(options.floor_bytes)};
}

// A device keeps the budget that it found where the options leave it open.
residency::Limits limits_of(State& s, const Options& options, int ordinal) {
  const Requested& requested = s.requested_of(ordinal);
  std::size_t budget = requested.budget_bytes > 0 ? requested.budget_bytes : options.budget_bytes;
  if (const Device* device = s.device(ordinal); device && budget == 0)
    budget = device->engine.limits().budget_bytes;
  return {budget, options.host_budget_bytes, options.min_swap_bytes, requested.outside_bytes,
          options.floor_bytes};
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

Status start(const Options& options) {
  UMEM_RETURN_IF_ERROR(check_options(options));
  State& s = state();
  std::lock_guard guard(s.mutex);
  if (s.forked)
    return {Code::kBadState, "the process was forked after umem had used a GPU; start it by spawn"};
  if (s.accepting)
    return options == s.options
               ? Status()
               : Status(Code::kBadState, "umem is running with other options; disable it first");
  s.each([](Device& device) { retire_reclaimed(device); });
  if (s.open() && !s.busy()) UMEM_RETURN_IF_ERROR(close_locked(s));
  if (!s.open()) {
    UMEM_RETURN_IF_ERROR(open_locked(s, options));
  } else {
    if (!same_device(options, s.options))
      return {Code::kBadState, "tensors of the previous session are still alive on the device '" +
                                   s.options.device + ":" + s.options.profile +
                                   "'; free them, or keep the device options"};
    for (Requested& requested : s.requested) requested.budget_bytes = 0;
    UMEM_RETURN_IF_ERROR(apply_limits(s, options));
    s.each([&](Device& device) { device.engine.set_policy(policy::make(options.policy)); });
    s.options = options;
    reset_peaks_locked(s);  // a new session's peaks are its own
  }
  s.accepting = true;
  return {};
}

Status stop() {
  State& s = state();
  std::lock_guard guard(s.mutex);
  s.accepting = false;
  end_pins(s);
  for (const trace::Sink sink : {trace::kPlan, trace::kFile}) trace::recorder().stop(sink);
  if (!s.open()) return {};
  FirstError error;
  s.each([&](Device& device) { error.keep(settle(s, device)); });
  UMEM_RETURN_IF_ERROR(error.take());
  return s.busy() ? Status() : close_locked(s);
}

bool running() {
  return state().accepting;
}

Options current_options() {
  State& s = state();
  std::lock_guard guard(s.mutex);
  return s.options;
}

Status set_budget(std::size_t device_bytes, std::size_t host_bytes) {
  State& s = state();
  std::lock_guard guard(s.mutex);
  if (!s.accepting && !s.open())
    return {Code::kBadState, "umem is not running; call umem.enable() first"};
  Options options = s.options;
  options.budget_bytes = device_bytes;
  options.host_budget_bytes = host_bytes;
  UMEM_RETURN_IF_ERROR(check_options(options));
  const std::vector<Requested> before = s.requested;
  for (Requested& requested : s.requested) requested.budget_bytes = 0;  // it is for all of them now
  Status status = apply_limits(s, options);
  if (status.ok()) return {};
  s.requested = before;
  const Status back = set_all_limits(s, s.options);
  (void)back;  // the refusal is what the caller has to know
  return status;
}

Status set_policy(const std::string& name) {
  State& s = state();
  std::lock_guard guard(s.mutex);
  if (!s.accepting && !s.open())
    return {Code::kBadState, "umem is not running; call umem.enable() first"};
  Options options = s.options;
  options.policy = name;
  UMEM_RETURN_IF_ERROR(check_options(options));
  s.each([&](Device& device) { device.engine.set_policy(policy::make(name)); });
  s.options = options;
  return {};
}

Stats stats() {
  State& s = state();
  std::lock_guard guard(s.mutex);
  return stats_locked(s);
}

void reset_peak_stats() {
  State& s = state();
  std::lock_guard guard(s.mutex);
  if (s.open()) reset_peaks_locked(s);
}

Status trim() {
  State& s = state();
  std::lock_guard guard(s.mutex);
  FirstError error;
  s.each([&](Device& device) {
    retire_reclaimed(device);
    error.keep(trim_locked(device, 0));
  });
  return error.take();
}

void step() noexcept {
  State& s = state();
  bool soft_device = false;
  {
    std::lock_guard guard(s.mutex);
    ++s.counts.steps;
    s.each([](Device& device) {
      device.engine.step_ended();
      device.arena.step_ended();
    });
    if (trace::recording()) trace::recorder().step();
    soft_device = s.open() && s.driver.kind == driver::Kind::kSoft && s.options.backed;
  }
  if (soft_device) {
    // Libraries loaded and handlers set since the last step must not hide page faults from us.
    soft::install_interposers();
    soft::install_fault_handler();
  }
  if (auto* listener = s.step_listener.load()) listener();
}

void set_step_listener(void (*listener)()) noexcept {
  state().step_listener = listener;
}

driver::Driver* current_driver() {
  State& s = state();
  std::lock_guard guard(s.mutex);
  return s.open() ? &s.driver : nullptr;
}

}  // namespace umem::runtime
