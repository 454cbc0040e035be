// The choice of gaps between uses that tensors spend on the host: the loop of
// umem/policies/default/choice.py.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "base/export.h"

namespace umem::planner {

using Ints = std::span<const std::int64_t>;
using Floats = std::span<const double>;

// Columns with one row per gap. Places number the ops that are over the capacity: a gap covers the
// places from `begin` up to `end`, and the first `wrap` places of the next step.
struct GapPlaces {
  Ints begin, end, wrap, bytes;
  Floats idle_us;
};

// Returns the gaps in which a tensor is away. In the given order, a tensor leaves if an op in the
// gap is over by all its bytes, and then if one is over at all; then, shortest idle time first, it
// stays if no op in the gap needs it to leave. `over`: bytes over the capacity, by place.
UMEM_API std::vector<std::int64_t> choose(const GapPlaces& gaps, Ints over, Ints order);

}  // namespace umem::planner
