#include "runtime/accounts.h"

#include <utility>

#include "runtime/devices.h"
#include "runtime/settle.h"

namespace umem::runtime {
namespace {

using managed::RangeId;

// Calls `act` with the device, if it was opened, and the lock held.
template <class Act>
void with_device(int ordinal, Act act) {
  State& s = state();
  if (!State::has_slot(ordinal)) return;
  const DeviceLock lock(s.slot(ordinal));
  if (s.open() && lock.device()) act(*lock.device());
}

template <class Act>
void each_stat(arena::ArenaStats& all, Act act) {
  for (arena::StatArray* stats :
       {&all.allocations, &all.segments, &all.active, &all.inactive_split, &all.allocated_bytes,
        &all.reserved_bytes, &all.active_bytes, &all.inactive_split_bytes, &all.requested_bytes})
    for (arena::Stat& stat : *stats) act(stat);
}

}  // namespace

arena::ArenaStats arena_stats(int device) noexcept {
  arena::ArenaStats result;
  with_device(device, [&](Device& d) { result = d.arena.stats(); });
  return result;
}

bool try_arena_stats(int device, arena::ArenaStats* stats) noexcept {
  State& s = state();
  if (!State::has_slot(device)) return false;
  const DeviceLock lock(s.slot(device), std::try_to_lock);
  if (!lock.held() || !lock.device() || s.forked) return false;
  *stats = lock.device()->arena.stats();
  return true;
}

void reset_peak_arena_stats(int device) noexcept {
  with_device(device, [](Device& d) {
    each_stat(d.arena.stats(), [](arena::Stat& stat) { stat.peak = stat.current; });
  });
}

void reset_accumulated_arena_stats(int device) noexcept {
  with_device(device, [](Device& d) {
    arena::ArenaStats& all = d.arena.stats();
    each_stat(all, [](arena::Stat& stat) { stat.allocated = stat.freed = 0; });
    all.retries = all.ooms = all.driver_allocs = all.driver_frees = 0;
  });
}

std::vector<arena::SegmentRow> segments(int device) {
  std::vector<arena::SegmentRow> result;
  with_device(device, [&](Device& d) { result = d.arena.describe(); });
  return result;
}

void* base_of(const void* ptr, std::size_t* bytes) noexcept {
  State& s = state();
  std::uintptr_t base = 0;
  with_range(s, ptr, [&](const DeviceLock&, RangeId id) {
    const managed::Range& range = s.ranges[s.ranges[id].head];
    if (bytes) *bytes = range.bytes;
    base = range.base;
    return true;
  });
  return reinterpret_cast<void*>(base);
}

void set_listener(arena::Listener listener) noexcept {
  state().listener = listener;
}

std::size_t available_bytes(int device) noexcept {
  std::size_t result = 0;
  with_device(device, [&](Device& d) {
    const engine::Limits& limits = d.engine.limits();
    const residency::Ledger& ledger = d.engine.ledger();
    const std::size_t live = ledger.resident_bytes() - ledger.dead_bytes() + limits.outside_bytes;
    result = limits.budget_bytes > live ? limits.budget_bytes - live : 0;
  });
  return result;
}

std::size_t budget(int device) noexcept {
  State& s = state();
  if (!State::has_slot(device)) return 0;
  const std::lock_guard registry(s.registry);
  const DeviceLock lock(s.slot(device));
  const Device* open = s.forked ? nullptr : lock.device();
  return open ? open->engine.limits().budget_bytes : limits_of(s, s.options, device).budget_bytes;
}

static Status set_device_budget(State& s, int device, std::size_t bytes) {
  if (!State::has_slot(device)) return no_such_device(device);
  const std::lock_guard registry(s.registry);
  const DeviceLock lock(s.slot(device));
  Options options = s.options;
  options.budget_bytes = bytes;
  Status status = check_limits(options);
  Requested& requested = s.requested[static_cast<std::size_t>(device)];
  const std::size_t before = std::exchange(requested.budget_bytes, bytes);
  Device* open = s.forked ? nullptr : lock.device();
  if (status.ok() && open) status = open->engine.set_limits(limits_of(s, s.options, device));
  if (!status.ok()) requested.budget_bytes = before;
  return status;
}

bool set_budget(int device, std::size_t bytes, Failure* error) noexcept {
  const Status status = set_device_budget(state(), device, bytes);
  if (!status.ok()) fail(error, status);
  return status.ok();
}

void set_outside_bytes(int device, std::size_t bytes) noexcept {
  State& s = state();
  if (!State::has_slot(device)) return;
  {
    const std::lock_guard registry(s.registry);
    // For a device that is opened later.
    s.requested[static_cast<std::size_t>(device)].outside_bytes = bytes;
  }
  with_device(device, [&](Device& d) { d.engine.set_outside_bytes(bytes); });
}

bool make_way(int device, std::size_t outside_bytes) noexcept {
  State& s = state();
  if (s.captures > 0 || !State::has_slot(device)) return false;
  set_outside_bytes(device, outside_bytes);
  DeviceLock lock(s.slot(device));
  if (!s.open() || !lock.device()) return false;
  return wait_for_moves(s, lock).ok() && release_all_cached(lock).ok();
}

void set_workspace_sizes(const std::size_t* sizes, std::size_t count) noexcept {
  State& s = state();
  const std::lock_guard registry(s.registry);
  s.workspace_sizes.assign(sizes, sizes + count);
  each_device(s, [&](Device& device) { device.engine.set_workspace_sizes(s.workspace_sizes); });
}

std::size_t usable_bytes(std::size_t total_bytes) noexcept {
  State& s = state();
  const std::lock_guard registry(s.registry);
  return s.usable_bytes(total_bytes);
}

void set_memory_fraction(double fraction) noexcept {
  state().memory_fraction = fraction;
}

void release_cached() noexcept {
  each_lock(state(), [](DeviceLock& lock) {
    const Status released = release_all_cached(lock);
    (void)released;  // memory that the driver refuses to take back is offered again later
  });
}

bool serves_graphs() noexcept {
  State& s = state();
  const std::lock_guard registry(s.registry);
  return !s.usable() || !s.mapped();
}

void capture_begin() noexcept {
  ++state().captures;
}

void capture_end() noexcept {
  --state().captures;
}

bool any_captures() noexcept {
  return state().captures > 0;
}

}  // namespace umem::runtime
