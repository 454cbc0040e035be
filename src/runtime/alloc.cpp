#include "runtime/alloc.h"

#include <algorithm>
#include <string>
#include <utility>

#include "runtime/deferred.h"
#include "runtime/device_lock.h"
#include "runtime/devices.h"
#include "runtime/memory.h"
#include "runtime/op_use.h"
#include "runtime/recorder_lock.h"
#include "runtime/victim_callback.h"

namespace umem::runtime {

using managed::RangeId;

// With the device's lock.
static Result<void*> allocate_running(State& s, DeviceLock& lock, std::size_t bytes, int device,
                                      cu::CUstream stream, Op* op) {
  if (!s.accepting || s.forked) return not_running(s);
  const bool asked = s.victim_callback != nullptr;
  if (asked) {
    ask_victims_for_block(s, bytes, lock);
    if (!s.accepting || s.forked) return not_running(s);  // the lock was released meanwhile
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

bool release(void* ptr) noexcept {
  State& s = state();
  const RangeId id = s.ranges.find(ptr);
  if (id == managed::kNoRange) return false;
  if (!s.open()) return s.forked;
  Slot& slot = s.slot_of(id);
  if (const DeviceLock lock(slot, std::try_to_lock); lock.held()) return free_block(s, slot, ptr);
  // The thread that holds the lock may be waiting for this thread.
  auto* left = new Released{ptr, slot.released.load()};
  while (!slot.released.compare_exchange_weak(left->before, left)) {
  }
  const DeviceLock again(slot, std::try_to_lock);  // else the lock's holder frees it
  return true;
}

// Calls `act` with the device that has the address and the id of its piece, under the lock.
template <class Act>
static bool with_block(const void* ptr, Act act) {
  State& s = state();
  return with_range(s, ptr, [&](DeviceLock& lock, RangeId id) {
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
