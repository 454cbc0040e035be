// The choice of units to evict when room is short, without a plan: pure functions of the ledger.
#pragma once
#include <cstddef>
#include <vector>

#include "residency/view.h"

namespace umem::policy {

// Appends units to evict, first to go first, until they hold `need` bytes or none is left.
using Victims = void(const residency::CandidateView& view, std::size_t need,
                     std::vector<residency::RangeId>& out);

// Least recently used first. Units below the size floor are evicted only if no larger one can be.
Victims lru_victims;
// SuperNeurons (PPoPP'18): move only when memory is short, and then the least recently used output
// of a convolution-like layer. If those do not suffice, any other unit above the size floor is
// evicted, least recently used first, rather than fail.
Victims conv_lru_victims;

}  // namespace umem::policy
