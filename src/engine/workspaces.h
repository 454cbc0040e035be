// Memory that cuBLAS keeps for itself: torch allocates it inside the first matrix product of a
// stream, and no op names it. LRU would evict it first, and each product would fault it back.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "residency/ledger.h"

namespace umem::engine {

using residency::Family;
using residency::Ledger;
using residency::RangeId;
using residency::Unit;

class Workspaces {
 public:
  // Their requested sizes in bytes.
  void set_sizes(std::vector<std::size_t> sizes) { sizes_ = std::move(sizes); }
  // False: `left_behind` and `find` have nothing to do.
  bool looking() const { return !sizes_.empty() || !candidates_.empty(); }
  // True if it may be one: an op of that family has allocated the unit, and it lives on.
  bool may_be(const Ledger& ledger, RangeId id, Family family) const;
  // An op of that family left the unit behind: a result, or a workspace.
  void left_behind(const Ledger& ledger, RangeId id, Family family);
  // Exempts those that no op has named for long. Appends those that are away.
  void find(Ledger& ledger, std::vector<RangeId>& away);
  // The unit lost its last block.
  void retired(Ledger& ledger, RangeId id);

 private:
  struct Candidate {
    RangeId id;
    std::uint64_t born, made;  // order of birth, and time of the op's end
  };
  std::vector<std::size_t> sizes_;
  std::vector<Candidate> candidates_;
  std::vector<RangeId> found_;
};

}  // namespace umem::engine
