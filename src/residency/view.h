// The view of the residency table that policies decide on.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "residency/ledger.h"

namespace umem::residency {

struct CandidateView {
  const Ledger& ledger;
  std::size_t min_swap_bytes;
  std::size_t available_bytes = 0;  // fits without evicting live units
  bool mapped = false;              // memory that must not be used while it moves

  // May be evicted now: resident, live, not in use by a running op or a collective, and not kept by
  // the program.
  bool evictable(RangeId id) const {
    const Unit& unit = ledger.at(id);
    return unit.state == State::kDevice && unit.op_pins == 0 && !unit.in_collective &&
           !unit.joined && !ledger.kept_in_place(id) && !(mapped && unit.may_be_used_unseen());
  }
  // The program wants it left in place.
  // So are mapped segments of small blocks, which operators may use unseen, and what is joined.
  bool kept_in_place(RangeId id) const {
    return ledger.kept_in_place(id) || ledger.at(id).joined || (mapped && ledger.at(id).segment);
  }
  bool away(RangeId id) const { return ledger.away(id); }
  bool live(RangeId id) const { return ledger.live(id); }
  // The size of its block counts, which may be in pieces.
  bool worth_moving(const Unit& unit) const {
    return !unit.segment && std::max(unit.bytes, unit.requested_bytes) >= min_swap_bytes;
  }
};

// The units that an op used on a device: its inputs, then its allocations. With duplicates; some
// may have died in the op and belong to another thread by now.
struct OpUse {
  const RangeId* ids;
  std::size_t count, inputs;
  std::int64_t name = 0;  // hash of the op's name
  bool inner = false;     // an op around it is still running
};

}  // namespace umem::residency
