#include "runtime/reports.h"

#include <algorithm>
#include <mutex>
#include <tuple>
#include <utility>

#include "driver/memory_info.h"
#include "runtime/device_lock.h"

namespace umem::runtime {

namespace {

using residency::RangeId;
using residency::Tag;

void add_device(const State& s, Device& device, Stats& result) {
  const arena::Footprint footprint = device.arena.footprint();
  const residency::Ledger& ledger = device.engine.ledger();
  const engine::Counters& moved = device.engine.counters();
  result.budget_bytes += device.engine.limits().budget_bytes;
  result.live_bytes += footprint.live_bytes;
  result.peak_live_bytes += device.peak_live_bytes;
  result.peak_small_bytes += device.peak_small_bytes;
  result.cached_bytes += footprint.cached_bytes;
  result.attached_bytes += device.engine.attached_bytes();
  result.dropped_bytes += ledger.dropped_bytes();
  result.bytes_discarded += moved.bytes_discarded;
  const engine::LaneMeter::Timed in = device.engine.timed_in(), out = device.engine.timed_out();
  result.timed_bytes_in += in.bytes;
  result.timed_bytes_out += out.bytes;
  result.timed_busy_in_us += in.us;
  result.timed_busy_out_us += out.us;
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
  if (!s.driver.telemetry) return;  // the software device reports actual transfers
  const driver::Telemetry now = s.driver.telemetry();
  result.resident_bytes = now.resident_bytes;
  result.peak_resident_bytes = now.peak_resident_bytes;
  result.host_bytes = now.host_bytes;
  result.peak_host_bytes = now.peak_host_bytes;
  result.bytes_in = now.bytes_in + now.fault_bytes_in;
  result.bytes_out = now.bytes_out + now.pressure_bytes_out;
  result.faults = now.faults;
  result.stall_us = now.stall_us;
  result.disk_bytes_in = now.disk.bytes_in;
  result.disk_bytes_out = now.disk.bytes_out;
  result.disk_busy_in_us = now.disk.busy_in_us;
  result.disk_busy_out_us = now.disk.busy_out_us;
  result.disk_open_us = now.disk.open_us;
  result.disk_file_bytes = now.disk.file_bytes;
  result.zero_copy_bytes += s.thrashed_bytes;
}

// Includes devices that were closed.
void add_slots(State& s, Stats& result) {
  for (Slot& slot : s.slots) {
    const DeviceLock lock(slot);
    result.allocs += slot.allocs;
    result.frees += slot.frees;
    result.ooms += slot.ooms;
  }
}

void add_unit(const residency::Unit& unit, std::vector<TagReport>& rows) {
  using residency::State;
  if (unit.state == State::kNone) return;
  const bool dead = unit.state == State::kDead || unit.state == State::kGone;
  TagReport& row = dead ? rows.back() : rows[static_cast<std::size_t>(unit.tag)];
  ++row.blocks;
  row.bytes += unit.bytes;
  if (unit.state == State::kDevice || unit.state == State::kDead) row.resident_bytes += unit.bytes;
}

}  // namespace

void reset_peaks(State& s) {
  s.unmanaged.reset();
  each_device(s, [](Device& device) {
    device.set_peak();
    device.engine.ledger().reset_peaks();
  });
  if (s.driver.reset_peak) s.driver.reset_peak();
}

Stats last_stats(State& s, const HeldDevices& all) {
  Stats last;
  last.host_budget_bytes = s.options.host_budget_bytes;
  all.each([&](Device& device) { add_device(s, device, last); });
  add_telemetry(s, last);
  return last;
}

Stats stats() {
  State& s = state();
  std::unique_lock registry(s.registry);
  Stats result;
  if (s.open()) {
    result.host_budget_bytes = s.options.host_budget_bytes;
    // Only the software device's figures are taken under the registry's lock, so that they are
    // consistent: no thread waits on it.
    if (!s.driver.telemetry) registry.unlock();
    each_device(s, [&](Device& device) { add_device(s, device, result); });
    if (registry) add_telemetry(s, result);
  } else {
    result = s.last;
  }
  add_slots(s, result);
  result.steps = s.steps;
  result.plans_rolled_back = s.plans_rolled_back;
  result.peak_unmanaged_bytes = s.unmanaged.most_bytes();
  return result;
}

Result<Stats> device_stats(int ordinal) {
  State& s = state();
  if (!State::has_slot(ordinal)) return no_such_device(ordinal);
  std::unique_lock registry(s.registry);
  Stats result;
  result.host_budget_bytes = s.options.host_budget_bytes;
  const bool soft = s.driver.telemetry != nullptr;  // the figures are those of the only device
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

SessionRecord session_record() {
  State& s = state();
  const std::lock_guard registry(s.registry);
  SessionRecord record;
  record.options = s.options;
  record.last = s.last;
  record.steps = s.steps;
  record.plans_rolled_back = s.plans_rolled_back;
  record.thrashed_bytes = s.thrashed_bytes;
  record.unmanaged_bytes = s.unmanaged.most_bytes();
  {
    const std::lock_guard lock(s.faults_mutex);
    record.faults_of = s.faults_of;
  }
  for (Slot& slot : s.slots) {
    const DeviceLock lock(slot);
    record.calls.emplace_back(slot.allocs, slot.frees, slot.ooms);
  }
  return record;
}

void restore(SessionRecord record) {
  State& s = state();
  const std::lock_guard registry(s.registry);
  if (s.accepting || s.opened != 0) return;
  s.options = std::move(record.options);
  s.last = record.last;
  s.steps = record.steps;
  s.plans_rolled_back = record.plans_rolled_back;
  s.thrashed_bytes = record.thrashed_bytes;
  s.unmanaged.set_most_bytes(record.unmanaged_bytes);
  {
    const std::lock_guard lock(s.faults_mutex);
    s.faults_of = std::move(record.faults_of);
  }
  for (std::size_t i = 0; i < record.calls.size(); ++i) {
    const DeviceLock lock(s.slots[i]);
    std::tie(s.slots[i].allocs, s.slots[i].frees, s.slots[i].ooms) = record.calls[i];
  }
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

std::vector<TagReport> bytes_by_tag() {
  std::vector<TagReport> rows;
  for (std::size_t tag = 0; tag < static_cast<std::size_t>(Tag::kCount); ++tag)
    rows.push_back({residency::name(static_cast<Tag>(tag))});
  rows.push_back({"cached"});
  State& s = state();
  each_device(s, [&](const Device& device) {
    const residency::Ledger& ledger = device.engine.ledger();
    for (RangeId id = 1; id < ledger.capacity(); ++id) add_unit(ledger.at(id), rows);
  });
  return rows;
}

Status device_memory(std::vector<DeviceMemory>* all) {
  State& s = state();
  std::unique_lock registry(s.registry);
  const auto requested = s.requested;
  const std::size_t asked_for = s.options.device_bytes;
  registry.unlock();  // a driver may be long in answering
  FirstError error;
  each_device(s, [&](Device& device) {
    const engine::Limits& limits = device.engine.limits();
    const residency::Ledger& ledger = device.engine.ledger();
    DeviceMemory row;
    row.device = device.place.device;
    Result<driver::MemoryInfo> memory = driver::memory_info(s.driver.table, device.place);
    if (memory.ok()) {
      row.free_bytes = memory.value().free_bytes;
      row.total_bytes = asked_for > 0 ? asked_for : memory.value().total_bytes;
      row.allowed_bytes = s.allowed_bytes(row.total_bytes);
      device.engine.observe_memory(row.free_bytes);
    }
    error.keep(memory.take_status());
    row.budget_bytes = limits.budget_bytes;
    row.requested_bytes = requested[static_cast<std::size_t>(row.device)].budget_bytes;
    row.held_bytes = ledger.resident_bytes() + limits.outside_bytes;
    row.dropped_bytes = ledger.dropped_bytes();
    const std::size_t known = ledger.resident_bytes() + ledger.dropped_bytes();
    row.unused_bytes =
        device.engine.attached_bytes() - std::min(known, device.engine.attached_bytes());
    all->push_back(row);
  });
  return error.take();
}

}  // namespace umem::runtime
