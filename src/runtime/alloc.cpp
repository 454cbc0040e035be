// Memory for the framework, and what it says of its blocks.
#include "runtime/alloc.h"

#include <algorithm>
#include <string>
#include <utility>

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

Status not_running(const State& s) {
  return {Code::kBadState,
          s.forked ? "the process was forked after it had used a GPU; start workers by spawn"
                   : "umem is not running; call umem.enable() first"};
}

// With the device's lock.
static Result<void*> allocate_running(State& s, DeviceLock& lock, std::size_t bytes, int device,
                                      cu::CUstream stream, Op* op) {
  if (!s.accepting || s.forked) return not_running(s);
  const bool asked = s.victim_callback != nullptr;
  if (asked) {
    ask_victims_for_block(s, bytes, lock);
    if (!s.accepting || s.forked) return not_running(s);  // it gave up the lock
  }
  if (!lock.device()) UMEM_RETURN_IF_ERROR(ensure_open(s, lock, device));
  Result<void*> result = allocate_on(s, lock, bytes, stream, op);
  if (asked && lock.device()) lock.device()->engine.set_preferred_victims({});
  return result;
}

void* allocate(std::size_t bytes, int device, std::uintptr_t stream, Failure* error) noexcept {
  if (error) *error = {};
  if (bytes == 0) return nullptr;
  Op* const op = t_op;
  const trace::Pause pause(op ? &op->trace : nullptr);
  State& s = state();
  if (!State::has_slot(device)) {
    fail(error, s.accepting ? no_such_device(device) : not_running(s));
    return nullptr;
  }
  DeviceLock lock(s.slot(device));
  Result<void*> result =
      allocate_running(s, lock, bytes, device, reinterpret_cast<cu::CUstream>(stream), op);
  if (result.ok()) return result.value();
  if (s.accepting && !s.forked) ++lock.slot().ooms;
  fail(error, result.take_status());
  return nullptr;
}

// With the device's lock. Waits for nothing.
static bool free_block(State& s, Slot& slot, void* ptr) {
  const RangeId id = s.ranges.find(ptr);  // under the lock: it may have gone
  if (id == managed::kNoRange || &s.slot_of(id) != &slot || !slot.device) return false;
  if (!s.open()) return s.forked;
  Device& device = *slot.device;
  // Before: the addresses may lead nowhere afterwards.
  if (!device.pins.empty()) end_pins(s, device, ptr, device.arena.block_at(ptr).bytes);
  Result<arena::Freed> freed = device.arena.free(ptr);
  if (!freed.ok()) return false;
  if (trace::recording()) RecorderLock(s)->free(reinterpret_cast<std::uintptr_t>(ptr));
  ++slot.frees;
  const arena::Freed& block = freed.value();
  if (!device.scopes.empty()) device.scopes.erase(ptr);
  if (block.last_in_range) device.engine.retire(block.range);
  // Programs of changing shapes leave ranges that no request fits: give the oldest back.
  const arena::Footprint footprint = device.arena.footprint();
  if (footprint.cached_bytes > 2 * device.max_live_bytes + 64 * MiB) {
    Status trimmed = trim_cache(device, std::max(device.max_live_bytes, kPageBytes));
    (void)trimmed;  // what the driver refuses to take back stays cached
  }
  return true;
}

void free_released(Slot& slot) {
  Released* newest = slot.released.exchange(nullptr);
  Released* oldest = nullptr;
  while (newest) {  // in the order of their release
    Released* before = std::exchange(newest->before, oldest);
    oldest = std::exchange(newest, before);
  }
  while (oldest) {
    const bool freed = free_block(state(), slot, oldest->block);
    (void)freed;  // its release was told that it is
    delete std::exchange(oldest, oldest->before);
  }
}

bool release(void* ptr) noexcept {
  State& s = state();
  const RangeId id = s.ranges.find(ptr);
  if (id == managed::kNoRange) return false;
  if (!s.open()) return s.forked;
  Slot& slot = s.slot_of(id);
  if (const DeviceLock lock(slot, std::try_to_lock); lock.held()) return free_block(s, slot, ptr);
  // Whoever has the lock may wait for what this thread has to do next.
  auto* left = new Released{ptr, slot.released.load()};
  while (!slot.released.compare_exchange_weak(left->before, left)) {
  }
  const DeviceLock again(slot, std::try_to_lock);  // given up in between: else its holder sees it
  return true;
}

// Calls `act` with the device that has the address and the id of its piece, under the lock.
template <class Act>
static bool with_block(const void* ptr, Act act) {
  State& s = state();
  return s.with_range(ptr, [&](DeviceLock& lock, RangeId id) {
    return s.open() && lock.device() && act(s, *lock.device(), id);
  });
}

bool record_stream(const void* ptr, std::uintptr_t stream) noexcept {
  return with_block(ptr, [&](State&, Device& device, RangeId) {
    return device.arena
        .record_stream(const_cast<void*>(ptr), reinterpret_cast<cu::CUstream>(stream))
        .ok();
  });
}

bool owns(const void* ptr) noexcept {
  return state().ranges.find(ptr) != managed::kNoRange;
}

// Calls `change` with the ledger and the unit of a live large block: a segment holds many blocks,
// and keeps its own tag.
template <class Change>
static bool change_label(const void* ptr, residency::Tag tag, Change change) {
  return with_block(ptr, [&](State& s, Device& device, RangeId id) {
    if (trace::recording())
      RecorderLock(s)->tag(reinterpret_cast<std::uintptr_t>(ptr), residency::name(tag));
    residency::Ledger& ledger = device.engine.ledger();
    if (!ledger.has(id)) return false;
    s.ranges.each_piece(id, [&](RangeId piece) {
      if (ledger.live(piece) && !ledger.at(piece).segment) change(ledger, piece);
    });
    return true;
  });
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
