#include "engine/hints.h"

#include "base/format.h"

namespace umem::engine {

using driver::CallScope;

Status Hints::check_evictable(RangeId id) const {
  if (!state_.managed)
    return {Code::kNotSupported, "memory is not managed here, so nothing can be evicted"};
  if (state_.ledger.at(id).op_pins > 0)
    return {Code::kBadState, "the block is in use by a running op"};
  if (state_.ledger.at(id).user_pins > 0)
    return {Code::kBadState, "the block is pinned; call umem.unpin() first"};
  if (state_.mapped() && state_.ledger.at(id).in_collective)
    return {Code::kBadState, "a collective may be using the block; evict it after a later step"};
  return {};
}

Status Hints::evict(RangeId id) {
  UMEM_RETURN_IF_ERROR(check_evictable(id));
  UMEM_RETURN_IF_ERROR(state_.check_moves());
  const CallScope scope(state_.table, state_.place);
  // An operator of another thread may have allocated a small block there for itself.
  if (state_.mapped() && (state_.ledger.at(id).segment || state_.ledger.at(id).joined)) return {};
  bool leaves = true;
  if (!state_.active()) {
    leaves = moves_.fits_on_host(id);
    if (leaves) {
      UMEM_RETURN_IF_ERROR(transfers_.send_back({id}));
      state_.ledger.hold_host(id);
    }
  } else if (state_.ledger.at(id).state == State::kDevice) {
    UMEM_RETURN_IF_ERROR(moves_.send_out({id}));
    leaves = state_.ledger.at(id).state != State::kDevice;
  } else if (!state_.mapped() && !state_.ledger.at(id).discarded) {
    // Page faults that umem does not see may have brought it.
    leaves = moves_.fits_on_host(id);
    if (leaves) UMEM_RETURN_IF_ERROR(moves_.send_again({id}));
  }
  return leaves ? Status()
                : Status(Code::kOutOfHostMemory, "the host budget has no room for the block");
}

Status Hints::check_user_pins(std::size_t more, std::size_t budget) const {
  const std::size_t pinned = state_.ledger.user_pinned_bytes();
  const std::size_t reserve = state_.limits.reserve_bytes;
  if (!state_.active() || pinned + more == 0 || pinned + more + reserve <= budget) return {};
  return {Code::kOutOfDeviceMemory, "of the budget of " + format_bytes(budget) + " " +
                                        format_bytes(reserve) +
                                        " stay free for what operators need at once, and " +
                                        format_bytes(pinned) + " are pinned already"};
}

// Streams that umem knows wait on their own.
Result<std::size_t> Hints::discard_live(RangeId id, managed::MemSpan part, cu::CUstream stream) {
  const Unit unit = state_.ledger.at(id);
  if (unit.op_pins > 0) return Status(Code::kBadState, "the block is in use by a running op");
  if (!state_.managed || state_.mapped() || !transfers_.local().can_discard())
    return std::size_t{0};
  const CallScope scope(state_.table, state_.place);
  if (driver::capturing(state_.table, state_.place, stream))
    return Status(Code::kBadState,
                  "the stream is being captured; discard before the capture, or after it");
  if (unit.read_mostly) UMEM_RETURN_IF_ERROR(read_mostly(id, false));
  Result<bool> discarded = transfers_.discard_live(id, part, stream);
  if (!discarded.ok()) return discarded.take_status();
  if (!discarded.value()) return std::size_t{0};
  state_.counters.bytes_discarded += part.bytes;
  if (part.bytes == unit.bytes) {
    state_.ledger.set_state(id, State::kVoid);
    state_.ledger.set_discarded(id);
  }
  UMEM_RETURN_IF_ERROR(transfers_.await_discard(unit.stream));
  UMEM_RETURN_IF_ERROR(transfers_.await_discard(stream));
  return part.bytes;
}

void Hints::placed_in_file(RangeId id) {
  state_.ledger.set_in_file(id, true);
  if (state_.active()) state_.ledger.set_state(id, State::kHost);
}

bool Hints::arriving(RangeId id) {
  const CallScope scope(state_.table, state_.place);
  const Unit& unit = state_.ledger.at(id);
  return unit.state == State::kDevice && transfers_.in().under_way(unit.arrival);
}

bool Hints::leaving(RangeId id) {
  const CallScope scope(state_.table, state_.place);
  const Unit& unit = state_.ledger.at(id);
  return unit.state == State::kHost && transfers_.out().under_way(unit.departure);
}

}  // namespace umem::engine
