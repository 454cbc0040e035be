// The input of a victim callback, and its type.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "residency/tags.h"

namespace umem::runtime {

// A unit that may be evicted. Least recently used first.
struct Candidate {
  std::uint32_t id;
  std::size_t bytes;
  residency::Tag tag;
  residency::Family family;
  std::uint64_t last_use;
  bool segment;
};

struct Shortage {
  std::size_t need = 0;  // bytes to evict
  std::size_t resident_bytes = 0, budget_bytes = 0;
  std::vector<Candidate> candidates;
};

// Appends the ids of the units to evict, in this order. Called before an op whose inputs do not
// fit, and before a large allocation that does not fit; never recursively on one thread.
using VictimCallback = void (*)(const Shortage& shortage, std::vector<std::uint32_t>& ids);

}  // namespace umem::runtime
