#include "runtime/memory.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <utility>
#include <vector>

#include "base/format.h"
#include "runtime/cache.h"
#include "runtime/cuts.h"
#include "runtime/op_use.h"
#include "runtime/recorder_lock.h"
#include "runtime/settle.h"

namespace umem::runtime {
namespace {

using managed::RangeId;
using residency::Family;
using residency::Tag;

struct Purpose {
  Tag tag;
  Family family;
};

// The purpose of a block allocated in `op`, until more is known at the op's end.
Purpose purpose(const Op* op) {
  if (!op) return {Tag::kInput, Family::kNone};
  if (!op->scope_marker) return {Tag::kWorkspace, op->family};
  return {op->phase == Phase::kOptimizer ? Tag::kOptimizer : Tag::kTemp, op->family};
}

// Blocks of different phases of a step die at different times, and share no segments.
std::uint32_t group(const Op* op) {
  switch (op ? op->phase : Phase::kNone) {
    case Phase::kBackward:
      return 1;
    case Phase::kOptimizer:
      return 2;
    default:
      return 0;
  }
}

// Hands the arena's block over to the engine, which makes room and populates its pages.
Status hand_over(State& s, Device& device, const arena::Allocation& block, cu::CUstream stream,
                 const Op* op) {
  engine::Engine& engine = device.engine;
  if (!block.first_in_range) {
    engine.prepare(block.range);
    return {};
  }
  if (block.large) cut_as_others(s, device, block.range);
  const Purpose why = block.large ? purpose(op) : Purpose{Tag::kPool, Family::kNone};
  const std::size_t unit_bytes = block.large ? block.bytes : kPageBytes;
  Status admitted =
      engine.admit(block.range, unit_bytes, !block.large, why.tag, why.family, stream);
  if (!admitted.ok()) engine.retire(block.range);
  return admitted;
}

Result<arena::Allocation> serve(State& s, DeviceLock& lock, std::size_t bytes, cu::CUstream stream,
                                const Op* op) {
  Device& device = *lock.device();
  retire_reclaimed(device);
  device.engine.finish_retired();  // also of those
  give_up_layout(device);
  bool refused = false;
  const auto admit = [&](const arena::Allocation& block) {
    Status admitted = hand_over(s, device, block, stream, op);
    refused = !admitted.ok();
    return admitted;
  };
  Result<arena::Allocation> block =
      device.arena.allocate(bytes, stream, group(op), std::cref(admit));
  if (block.ok() || refused) return block;
  ++device.arena.stats().retries;
  // The driver has no more memory: free the cache.
  UMEM_RETURN_IF_ERROR(trim_cache(device, 0));
  UMEM_RETURN_IF_ERROR(wait_until_freed(lock));  // without the lock for a while
  device.engine.finish_retired();
  give_up_layout(device);
  return device.arena.allocate(bytes, stream, group(op), std::cref(admit));
}

// Waits for blocks that other streams still use: the last reserve.
void wait_for_pending(State& s, DeviceLock& lock) {
  Device& device = *lock.device();
  std::vector<cu::CUevent> events;
  const Status recorded = device.arena.pending_events(events);
  (void)recorded;  // the retried allocation reports the failure
  lock.without([&] {
    const driver::CallScope scope(s.driver.table, device.place);
    for (cu::CUevent event : events) s.driver.table.cuEventSynchronize(event);
  });
  retire_reclaimed(device);
}

// Making room is no part of the time of the op that allocates.
class PausedTimer {
 public:
  PausedTimer(State& s, Op* op, std::size_t bytes) : s_(s) {
    if (!trace::recording() || bytes < kPageBytes) return;
    while (op && !op->trace.open) op = op->parent;
    op_ = op;
    if (op_) RecorderLock(s_)->pause(op_->trace, stream());
  }
  ~PausedTimer() {
    if (op_) RecorderLock(s_)->resume(op_->trace, stream());
  }
  PausedTimer(const PausedTimer&) = delete;
  PausedTimer& operator=(const PausedTimer&) = delete;

 private:
  cu::CUstream stream() const { return reinterpret_cast<cu::CUstream>(op_->stream); }

  State& s_;
  Op* op_ = nullptr;
};

Result<arena::Allocation> make_room_and_serve(State& s, DeviceLock& lock, std::size_t bytes,
                                              cu::CUstream stream, Op* op) {
  const PausedTimer paused(s, op, bytes);
  Result<arena::Allocation> taken = serve(s, lock, bytes, stream, op);
  if (!is_out_of_memory(taken.code()) || !lock.device()->arena.any_pending() || s.captures > 0)
    return taken;
  wait_for_pending(s, lock);
  return serve(s, lock, bytes, stream, op);
}

void record_alloc(State& s, const Device& device, const arena::Allocation& block, std::size_t bytes,
                  Op* op) {
  const Purpose why = purpose(op);
  RecorderLock(s)->alloc(reinterpret_cast<std::uintptr_t>(block.ptr), bytes,
                         residency::name(why.tag), family_name(why.family), device.place.device,
                         op && !op->scope_marker ? &op->trace : nullptr);
}

// Records the requested size and the scope, for exemptions and reports.
void name_block(State& s, Device& device, const arena::Allocation& block, std::size_t bytes) {
  if (const std::uint32_t scope = ScopeNames::current()) device.scopes[block.ptr] = scope;
  if (!block.large) return;
  residency::Ledger& ledger = device.engine.ledger();
  s.ranges.each_piece(block.range, [&](RangeId id) {
    if (ledger.has(id)) ledger.set_requested_bytes(id, bytes);
  });
}

Status out_of_memory(const Device& device, Code code, std::size_t bytes, const std::string& why) {
  const engine::Engine& engine = device.engine;
  const residency::Ledger& ledger = engine.ledger();
  struct Holder {
    std::size_t bytes;
    RangeId id;
  };
  std::vector<Holder> holders;
  std::size_t evictable = 0;
  for (RangeId id = 1; id < ledger.capacity(); ++id) {
    const residency::Unit& unit = ledger.at(id);
    if (engine.view().evictable(id)) evictable += unit.bytes;
    if (ledger.live(id)) holders.push_back({unit.bytes, id});
  }
  const std::size_t shown = std::min<std::size_t>(3, holders.size());
  std::partial_sort(holders.begin(), holders.begin() + static_cast<std::ptrdiff_t>(shown),
                    holders.end(),
                    [](const Holder& a, const Holder& b) { return a.bytes > b.bytes; });
  std::string text = "umem out of memory: asked for " + format_bytes(bytes) + "; budget " +
                     format_bytes(engine.limits().budget_bytes) + ", resident " +
                     format_bytes(ledger.resident_bytes()) + ", evictable " +
                     format_bytes(evictable) + ", live " + format_bytes(ledger.live_bytes()) +
                     ", host " + format_bytes(ledger.host_bytes());
  if (const std::size_t most = engine.limits().host_budget_bytes)
    text += " of " + format_bytes(most);
  text += ". " + why + ". Largest holders:";
  for (std::size_t i = 0; i < shown; ++i) {
    const residency::Unit& unit = ledger.at(holders[i].id);
    text += (i ? ", " : " ") + format_bytes(unit.bytes) + " " + residency::name(unit.tag) + "/" +
            residency::name(unit.family) + " (" + residency::name(unit.state) + ")";
  }
  text += shown ? "." : " none.";
  return {code, std::move(text)};
}

// A program that catches the error, as a search for a batch size does, does not show it.
void warn_refused(const State& s, Device& device, std::size_t bytes, const std::string& why) {
  if (device.warned_refused || s.options.timed) return;  // a replay says it itself
  device.warned_refused = true;
  const engine::Limits& given = device.engine.limits();
  std::string limits = "a budget of " + format_bytes(given.budget_bytes);
  if (device.engine.managed() && given.host_budget_bytes)  // else nothing leaves the device
    limits += " and a host budget of " + format_bytes(given.host_budget_bytes);
  std::fprintf(stderr,
               "umem: warning: out of memory: a block of %s was refused with %s: %s; raise what "
               "limits it, or keep fewer tensors (logged once; umem.summary() counts refusals)\n",
               format_bytes(bytes).c_str(), limits.c_str(), why.c_str());
}

}  // namespace

Result<void*> allocate_on(State& s, DeviceLock& lock, std::size_t bytes, cu::CUstream stream,
                          Op* op) {
  Device& device = *lock.device();
  const std::uint64_t left_before = device.engine.counters().left_out;
  Result<arena::Allocation> taken = make_room_and_serve(s, lock, bytes, stream, op);
  if (!taken.ok()) {
    const Status status = taken.take_status();
    ++device.arena.stats().ooms;
    if (const arena::Listener listener = s.listener)
      listener({arena::EventKind::kOutOfMemory, device.place.device, 0, bytes, bytes,
                reinterpret_cast<std::uintptr_t>(stream)});
    std::string why = status.message();
    if (status.code() == Code::kOutOfDeviceMemory && !s.driver.disk.empty() &&
        why != managed::kGuardRefusal)
      why =
          "the disk of '" + s.driver.disk +
          "' takes no more: it is full, or the limit of its file is reached; free space, raise the "
          "limit, or name another folder";
    if (!is_out_of_memory(status.code())) return Status(status.code(), why);
    // Otherwise the refused block's range stays. An idle layout does.
    const Status trimmed = trim_cache(device, kPageBytes);
    (void)trimmed;  // memory that the driver refuses to take back stays cached
    warn_refused(s, device, bytes, why);
    return out_of_memory(device, status.code(), bytes, why);
  }
  name_block(s, device, taken.value(), bytes);
  if (trace::recording()) record_alloc(s, device, taken.value(), bytes, op);
  const engine::Engine& engine = device.engine;
  // The op that allocated it is using it, so it must not be evicted while the op runs.
  if (op && !op->scope_marker) {
    pin(*op, device, taken.value().range);
    if (engine.counters().left_out > left_before) note_above_budget(device, *op);
  }
  if (engine.managed() && taken.value().bytes > engine.limits().budget_bytes)
    warn_above_budget(device, "a block", taken.value().bytes);
  ++lock.slot().allocs;
  const std::size_t live = device.arena.footprint().live_bytes;
  if (live > device.peak_live_bytes) device.set_peak();
  device.max_live_bytes = std::max(device.max_live_bytes, live);
  return taken.value().ptr;
}

}  // namespace umem::runtime
