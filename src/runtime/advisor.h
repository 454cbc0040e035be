// Somebody outside who is asked whom to evict: a policy in Python.
//
// He is asked while the runtime's lock is NOT held, because his answer may need a lock of his own
// (the interpreter's) that another thread holds while it frees memory, which takes the runtime's.
// So what he saw may be different when his answer comes: what cannot leave then is left out.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/export.h"
#include "residency/tags.h"

namespace umem::runtime {

// What may leave, the least recently used first.
struct Candidate {
  std::uint32_t id;
  std::size_t bytes;
  residency::Tag tag;
  residency::Family family;
  std::uint64_t last_use;
  bool segment;
};

struct Shortage {
  std::size_t need = 0;  // bytes that have to leave
  std::size_t resident_bytes = 0, budget_bytes = 0;
  std::vector<Candidate> candidates;
};

// Appends the ids of those to evict, first to go first. Asked before an op whose inputs do not fit,
// and before a large allocation that does not; never by a thread that he is just answering.
using Advisor = void (*)(const Shortage& shortage, std::vector<std::uint32_t>& ids);
// Null: nobody.
UMEM_API void set_advisor(Advisor advisor) noexcept;

}  // namespace umem::runtime
