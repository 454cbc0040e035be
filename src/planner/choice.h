// Which gaps between the uses of tensors are spent away: the loop of
// umem/policies/default/choice.py.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "base/export.h"

namespace umem::planner {

using Ints = std::span<const std::int64_t>;
using Floats = std::span<const double>;

// Columns, a row a gap. Places are those of the ops that are over the capacity, in order: a gap
// covers those from `begin` up to `end`, and, of the next step, the first `wrap` ones.
struct GapPlaces {
  Ints begin, end, wrap, bytes;
  Floats idle_us;
};

// The gaps that are left. In the given order a tensor leaves where an op inside is over by all its
// bytes, then where one is over at all; then, the shortest idle first, it stays where no op inside
// needs it to leave. `over`: bytes over the capacity, by place.
UMEM_API std::vector<std::int64_t> choose(const GapPlaces& gaps, Ints over, Ints order);

}  // namespace umem::planner
