// A policy is a pure function of the ledger: it says which units should leave, and moves nothing.
#pragma once
#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "residency/ledger.h"

namespace umem::residency {

struct View {
  const Ledger& ledger;
  std::size_t min_swap_bytes;

  // May leave now: resident, live, not in use by a running op.
  bool evictable(RangeId id) const {
    const Unit& unit = ledger.at(id);
    return unit.state == State::kDevice && unit.pins == 0;
  }
  bool worth_moving(const Unit& unit) const {
    return !unit.segment && unit.bytes >= min_swap_bytes;
  }
};

class Policy {
 public:
  virtual ~Policy() = default;
  virtual const char* name() const = 0;
  // False: the engine neither evicts nor prefetches, and the driver's faults do it all.
  virtual bool active() const { return true; }
  // Appends units to evict, first to go first, until they hold `need` bytes or none is left.
  virtual void victims(const View& view, std::size_t need, std::vector<RangeId>& out) const = 0;
};

}  // namespace umem::residency
