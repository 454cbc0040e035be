// Memory for the framework, and what it says of its blocks.
#include "runtime/alloc.h"

#include <string>

#include "runtime/record.h"
#include "runtime/state.h"

namespace umem::runtime {

using managed::RangeId;

void fail(Failure* error, const Status& status) {
  thread_local std::string message;  // of the last failure on this thread
  if (!error) return;
  message = status.message();
  *error = {static_cast<int>(status.code()), message.c_str()};
}

void* allocate(std::size_t bytes, int device, std::uintptr_t stream, Failure* error) noexcept {
  if (error) *error = {};
  if (bytes == 0) return nullptr;
  Op* const op = t_op;
  const trace::Pause pause(op ? &op->trace : nullptr);
  State& s = state();
  std::unique_lock guard(s.mutex);
  const bool asked = s.accepting && s.victim_callback != nullptr;
  if (asked) ask_victims_for_block(s, bytes, device, guard);
  if (!s.accepting || s.forked) {
    fail(error, {Code::kBadState,
                 s.forked ? "the process was forked after it had used a GPU; start workers by spawn"
                          : "umem is not running; call umem.enable() first"});
    return nullptr;
  }
  Result<void*> result =
      allocate_locked(s, bytes, device, reinterpret_cast<cu::CUstream>(stream), op);
  if (asked) forget_victims(s);
  if (result.ok()) return result.value();
  ++s.counts.ooms;
  fail(error, result.take_status());
  return nullptr;
}

bool release(void* ptr) noexcept {
  State& s = state();
  if (!owns(ptr)) return false;
  std::lock_guard guard(s.mutex);
  const RangeId id = s.ranges.find(ptr);  // under the lock: it may have gone
  if (id == managed::kNoRange) return false;
  if (!s.open()) return s.forked;
  Device& device = s.owner(id);
  // Before: the addresses may lead nowhere afterwards.
  if (!s.pins.empty()) end_pins(s, ptr, device.arena.block_at(ptr).bytes);
  Result<arena::Freed> freed = device.arena.free(ptr);
  if (!freed.ok()) return false;
  if (trace::recording()) trace::recorder().free(reinterpret_cast<std::uintptr_t>(ptr));
  ++s.counts.frees;
  const arena::Freed& block = freed.value();
  s.scopes.forget(ptr);
  if (block.last_in_range) device.engine.retire(block.range);
  // Programs of changing shapes leave ranges that no request fits: give the oldest back.
  const arena::Footprint footprint = device.arena.footprint();
  if (footprint.cached_bytes > 2 * device.max_live_bytes + 64 * MiB) {
    Status trimmed = trim_locked(device, device.max_live_bytes);
    (void)trimmed;  // what the driver refuses to take back stays cached
  }
  return true;
}

bool record_stream(const void* ptr, std::uintptr_t stream) noexcept {
  State& s = state();
  if (!owns(ptr)) return false;
  std::lock_guard guard(s.mutex);
  const RangeId id = s.ranges.find(ptr);  // under the lock: it may have gone
  if (id == managed::kNoRange) return false;
  return s.open() &&
         s.owner(id)
             .arena.record_stream(const_cast<void*>(ptr), reinterpret_cast<cu::CUstream>(stream))
             .ok();
}

bool owns(const void* ptr) noexcept {
  return state().ranges.find(ptr) != managed::kNoRange;
}

// Calls `change` with the ledger and the unit of a live large block: a segment holds many blocks,
// and keeps its own tag.
template <class Change>
static bool change_label(const void* ptr, residency::Tag tag, Change change) {
  State& s = state();
  if (!owns(ptr)) return false;
  std::lock_guard guard(s.mutex);
  const RangeId id = s.ranges.find(ptr);  // under the lock: it may have gone
  if (id == managed::kNoRange) return false;
  if (!s.open()) return false;
  if (trace::recording())
    trace::recorder().tag(reinterpret_cast<std::uintptr_t>(ptr), residency::name(tag));
  residency::Ledger& ledger = s.owner(id).engine.ledger();
  if (!ledger.has(id)) return false;
  s.ranges.each_piece(id, [&](RangeId piece) {
    if (ledger.live(piece) && !ledger.at(piece).segment) change(ledger, piece);
  });
  return true;
}

bool tag(const void* ptr, residency::Tag tag) noexcept {
  return change_label(ptr, tag, [tag](residency::Ledger& ledger, RangeId id) {
    ledger.set_tag(id, tag, ledger.at(id).family);
  });
}

bool label(const void* ptr, residency::Tag tag, residency::Family family) noexcept {
  return change_label(
      ptr, tag, [=](residency::Ledger& ledger, RangeId id) { ledger.set_tag(id, tag, family); });
}

}  // namespace umem::runtime
