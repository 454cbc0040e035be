// One event of a trace, as docs/trace_format.md has it. Names of ops are not kept.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "residency/tags.h"

namespace umem::replay {

using BlockId = std::uint64_t;  // up to 2^63 - 1

struct Event {
  enum class Kind : unsigned char { kAlloc, kOp, kFree, kStep } kind = Kind::kStep;
  BlockId id = 0;
  std::size_t bytes = 0;
  // kCount where the trace does not say.
  residency::Tag tag = residency::Tag::kCount;
  residency::Family family = residency::Family::kCount;
  double us = -1;  // below 0: not said
  std::vector<BlockId> reads, writes;
  // Rows of three: which of the reads and then the writes, and the bytes from where to where of its
  // block. Of an access without a row it is all.
  std::vector<std::uint64_t> parts;
};

}  // namespace umem::replay
