#include "runtime/accounts.h"

#include <utility>

#include "runtime/state.h"

namespace umem::runtime {
namespace {

// Calls `act` with the device, if it was opened, and the lock held.
template <class Act>
void with_device(int ordinal, Act act) {
  State& s = state();
  std::lock_guard guard(s.mutex);
  if (!s.open()) return;
  if (Device* device = s.device(ordinal)) act(*device);
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
  std::lock_guard guard(s.mutex);
  const managed::RangeId id = s.ranges[s.ranges.find(ptr)].head;
  if (id == managed::kNoRange) return nullptr;
  if (bytes) *bytes = s.ranges[id].bytes;
  return reinterpret_cast<void*>(s.ranges[id].base);
}

void set_listener(Listener listener) noexcept {
  State& s = state();
  std::lock_guard guard(s.mutex);
  s.listener = listener;
  s.each([&](Device& device) { device.arena.set_listener(listener); });
}

std::size_t available_bytes(int device) noexcept {
  std::size_t result = 0;
  with_device(device, [&](Device& d) {
    const residency::Limits& limits = d.engine.limits();
    const residency::Ledger& ledger = d.engine.ledger();
    const std::size_t live = ledger.resident_bytes() - ledger.dead_bytes() + limits.outside_bytes;
    result = limits.budget_bytes > live ? limits.budget_bytes - live : 0;
  });
  return result;
}

std::size_t budget(int device) noexcept {
  State& s = state();
  std::lock_guard guard(s.mutex);
  const Device* open = s.forked ? nullptr : s.device(device);
  return open ? open->engine.limits().budget_bytes : limits_of(s, s.options, device).budget_bytes;
}

bool set_budget(int device, std::size_t bytes, Failure* error) noexcept {
  State& s = state();
  std::lock_guard guard(s.mutex);
  Options options = s.options;
  options.budget_bytes = bytes;
  Status status = check_limits(options);
  Requested& requested = s.requested_of(device);
  const std::size_t before = std::exchange(requested.budget_bytes, bytes);
  Device* open = s.forked ? nullptr : s.device(device);
  if (status.ok() && open) status = open->engine.set_limits(limits_of(s, s.options, device));
  if (status.ok()) return true;
  requested.budget_bytes = before;
  fail(error, status);
  return false;
}

void set_outside_bytes(int device, std::size_t bytes) noexcept {
  {
    State& s = state();
    std::lock_guard guard(s.mutex);
    s.requested_of(device).outside_bytes = bytes;  // for a device that is opened later
  }
  with_device(device, [&](Device& d) { d.engine.set_outside_bytes(bytes); });
}

void set_workspace_sizes(const std::size_t* sizes, std::size_t count) noexcept {
  State& s = state();
  std::lock_guard guard(s.mutex);
  s.workspace_sizes.assign(sizes, sizes + count);
  s.each([&](Device& device) { device.engine.set_workspace_sizes(s.workspace_sizes); });
}

void release_cached() noexcept {
  State& s = state();
  std::lock_guard guard(s.mutex);
  s.each([](Device& device) {
    retire_reclaimed(device);
    const Status trimmed = trim_locked(device, 0);
    (void)trimmed;  // what the driver refuses to take back stays cached
  });
}

void capture_begin() noexcept {
  ++state().captures;
}

void capture_end() noexcept {
  --state().captures;
}

}  // namespace umem::runtime
