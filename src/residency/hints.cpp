// What the program itself asks to be done with a unit.
#include <algorithm>

#include "base/format.h"
#include "residency/engine.h"

namespace umem::residency {

using driver::CallScope;

Status Engine::prefetch(RangeId id) {
  if (!managed_ || !away(id)) return {};
  const CallScope scope(table_, place_);
  one_.assign(1, id);
  if (!active()) {
    events_.clear();
    return in_.submit(Verb::kBringIn, spans_of(one_), events_).take_status();
  }
  UMEM_RETURN_IF_ERROR(fetch(one_, nullptr));
  if (away(id)) return {Code::kOutOfDeviceMemory, "the block does not fit beside what is in use"};
  ledger_.set_prefetched(id);
  return {};
}

Status Engine::check_evictable(RangeId id) const {
  if (!managed_)
    return {Code::kNotSupported, "managed memory cannot be used here, so nothing can be evicted"};
  if (ledger_.at(id).pins > 0) return {Code::kBadState, "the block is in use by a running op"};
  if (ledger_.at(id).holds > 0)
    return {Code::kBadState, "the block is pinned; call umem.unpin() first"};
  return {};
}

Status Engine::evict(RangeId id) {
  UMEM_RETURN_IF_ERROR(check_evictable(id));
  const CallScope scope(table_, place_);
  one_.assign(1, id);
  if (!active()) return send_back(one_);
  if (ledger_.at(id).state != State::kDevice) return {};
  UMEM_RETURN_IF_ERROR(send_out(one_));
  if (ledger_.at(id).state == State::kDevice)
    return {Code::kOutOfHostMemory, "the host budget has no room for the block"};
  return {};
}

Status Engine::check_holds(std::size_t more, std::size_t budget) const {
  const std::size_t held = ledger_.held_bytes();
  if (!active() || held + more == 0 || held + more + limits_.reserve_bytes <= budget) return {};
  return {Code::kOutOfDeviceMemory, "of the budget of " + format_bytes(budget) + " " +
                                        format_bytes(limits_.reserve_bytes) +
                                        " stay free for what operators need at once, and " +
                                        format_bytes(held) + " are pinned already"};
}

// Ordered like a kernel of `stream` that writes the bytes: after all that it holds, and before all
// that it will be given. Streams that umem knows of wait on their own.
Result<std::size_t> Engine::discard_live(RangeId id, backing::Span part, cu::CUstream stream) {
  const Unit unit = ledger_.at(id);
  if (unit.pins > 0) return Status(Code::kBadState, "the block is in use by a running op");
  if (!managed_ || !local_.can_discard()) return std::size_t{0};
  const CallScope scope(table_, place_);
  if (driver::capturing(table_, place_, stream))
    return Status(Code::kBadState,
                  "the stream is being captured; discard before the capture, or after it");
  if (unit.read_mostly) UMEM_RETURN_IF_ERROR(read_mostly(id, false));
  events_.clear();
  UMEM_RETURN_IF_ERROR(after_home(id));
  UMEM_RETURN_IF_ERROR(streams_.after_all(stream, ledger_.now(), events_));
  UMEM_RETURN_IF_ERROR(streams_.after(unit.used_on, unit.last_use, ledger_.now(), events_));
  UMEM_RETURN_IF_ERROR(out_.make_wait(local_, unit.departure));
  UMEM_RETURN_IF_ERROR(in_.make_wait(local_, unit.arrival));
  Result<Ticket> ticket = local_.submit(Verb::kDiscard, {part}, events_);
  if (!ticket.ok()) return ticket.take_status();
  if (!local_.can_discard()) return std::size_t{0};  // the driver has just said so
  last_discard_ = ticket.value();
  ledger_.set_populated(id, last_discard_);  // whoever uses it next waits
  counters_.bytes_discarded += part.bytes;
  if (part.bytes == unit.bytes) {
    ledger_.set_state(id, State::kVoid);
    ledger_.set_discarded(id);
  }
  UMEM_RETURN_IF_ERROR(local_.make_wait(unit.stream, last_discard_));
  UMEM_RETURN_IF_ERROR(local_.make_wait(stream, last_discard_));
  return part.bytes;
}

bool Engine::arriving(RangeId id) {
  const CallScope scope(table_, place_);
  return ledger_.at(id).state == State::kDevice && in_.under_way(ledger_.at(id).arrival);
}

bool Engine::leaving(RangeId id) {
  const CallScope scope(table_, place_);
  return ledger_.at(id).state == State::kHost && out_.under_way(ledger_.at(id).departure);
}

}  // namespace umem::residency
