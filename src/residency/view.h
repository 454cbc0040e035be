// What policies see.
#pragma once
#include <cstddef>
#include <cstdint>

#include "residency/ledger.h"

namespace umem::residency {

struct CandidateView {
  const Ledger& ledger;
  std::size_t min_swap_bytes;
  std::size_t available_bytes = 0;  // could be brought in now without evicting anything that lives

  // May leave now: resident, live, not in use by a running op or a collective, and the program does
  // not keep it.
  bool evictable(RangeId id) const {
    const Unit& unit = ledger.at(id);
    return unit.state == State::kDevice && unit.op_pins == 0 && !unit.in_collective &&
           !ledger.kept_in_place(id);
  }
  // The program wants it left where it is.
  bool kept_in_place(RangeId id) const { return ledger.kept_in_place(id); }
  bool away(RangeId id) const { return ledger.away(id); }
  bool live(RangeId id) const { return ledger.live(id); }
  bool worth_moving(const Unit& unit) const {
    return !unit.segment && unit.bytes >= min_swap_bytes;
  }
};

// What an op used on a device: first its inputs, then what was allocated in it. With repetitions;
// some may have died in it, and the unit be another thread's by now.
struct OpUse {
  const RangeId* ids;
  std::size_t count, inputs;
  std::int64_t name = 0;  // a number for the op's name
};

}  // namespace umem::residency
