// The program's own requests for a unit.
#pragma once
#include <cstddef>

#include "base/status.h"
#include "engine/engine_state.h"
#include "engine/moves.h"
#include "engine/transfers.h"
#include "engine/write_back.h"

namespace umem::engine {

class Hints {
 public:
  Hints(EngineState& state, Transfers& transfers, Moves& moves, WriteBack& write_back)
      : state_(state), transfers_(transfers), moves_(moves), write_back_(write_back) {}

  // True if a running op or a collective may use the unit on the host, where it has to stay.
  bool pinned_in_place(RangeId id) const {
    const residency::Unit& unit = state_.ledger.at(id);
    return state_.mapped() && (unit.op_pins > 0 || unit.in_collective);
  }
  Status prefetch(RangeId id) { return moves_.prefetch(id); }
  // kBadState if an op is using the unit, or the program pinned it.
  Status evict(RangeId id);
  Status check_evictable(RangeId id) const;
  // kOutOfDeviceMemory if `more` pinned bytes would leave less than the reserve of `budget`.
  Status check_user_pins(std::size_t more, std::size_t budget) const;
  // Makes the unit's whole pages in the span indeterminate, like work on `stream`. Returns the
  // number of bytes: 0 if memory does not move, or the driver cannot.
  Result<std::size_t> discard_live(RangeId id, managed::MemSpan part, cu::CUstream stream);
  // True while the unit is on its way in, or out.
  bool arriving(RangeId id);
  bool leaving(RangeId id);
  // The driver has placed the unit's contents in a file, and taken them from the device.
  void placed_in_file(RangeId id);
  Status read_mostly(RangeId id, bool on) { return write_back_.advise(id, on); }

 private:
  EngineState& state_;
  Transfers& transfers_;
  Moves& moves_;
  WriteBack& write_back_;
};

}  // namespace umem::engine
