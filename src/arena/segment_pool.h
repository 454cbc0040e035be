// Small blocks: first fit by address (Wilson, Johnstone, Neely and Boles, "Dynamic storage
// allocation: a survey and critical review", IWMM 1995) over 2 MiB segments, with all bookkeeping
// outside the memory that it manages, since that may be on the device.
//
// Segments move as a whole, so what matters is which blocks share one. By first fit the blocks that
// a program makes in turn lie side by side, and where they lie depends on what is live, not on the
// order of releases: steps that repeat find them at the same addresses. And a segment that is
// nearly full where a step ends takes no more blocks: the holes among weights are not filled with
// what lives for an op.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "arena/stats.h"
#include "base/units.h"
#include "managed/range_table.h"

namespace umem::arena {

using managed::RangeId;

inline constexpr std::size_t kUnit = 256;  // size and alignment of the smallest block
inline constexpr std::uint32_t kSegmentUnits = kPageBytes / kUnit;

class SegmentPool {
 public:
  // Of a block, or none when no segment has room; the offset is in units.
  struct Block {
    RangeId segment = managed::kNoRange;
    std::uint32_t offset = 0;
  };
  // `requested_bytes` > 0.
  Block allocate(std::uint32_t requested_bytes);
  // Adds a segment, all free.
  void add(RangeId segment);
  // Takes a segment out that is all free.
  void remove(RangeId segment);
  // Units of the live block that starts at `offset`; 0 if none does.
  std::uint32_t units_at(RangeId segment, std::uint32_t offset) const;
  std::uint32_t requested_at(RangeId segment, std::uint32_t offset) const;
  // Appends all blocks of the segment, free and not, by address.
  void describe(RangeId segment, std::uintptr_t base, std::vector<BlockRow>& out) const;
  std::size_t segments() const { return seats_.size(); }
  // Free blocks of all segments.
  std::uint32_t free_blocks() const { return free_blocks_; }
  void free(RangeId segment, std::uint32_t offset);
  // Segments that are nearly full now are settled, as long as they stay so.
  void step_ended();
  // Asserts that the sums are those of the blocks. A full scan. Returns the free units.
  std::size_t check_invariants() const;

 private:
  struct Segment {
    std::array<std::uint64_t, kSegmentUnits / 64> used{};  // a bit a unit
    std::vector<std::uint32_t> requested;  // by unit: of the block that starts there
    std::uint32_t free_units = kSegmentUnits;
    std::size_t seat = 0;
  };
  struct Seat {  // what the search looks at
    RangeId segment = managed::kNoRange;
    std::uint32_t longest = kSegmentUnits;  // no free run is longer
    bool settled = false;
  };
  // The first unit from `from` on that is used, or free; the end of the segment without one.
  static std::uint32_t next(const Segment& segment, std::uint32_t from, bool used);
  // Where the free run begins that ends before `end`.
  static std::uint32_t run_start(const Segment& segment, std::uint32_t end);
  static void mark(Segment& segment, std::uint32_t from, std::uint32_t units, bool used);

  std::vector<std::unique_ptr<Segment>> segments_;  // by id
  std::vector<Seat> seats_;                         // in the order in which they were added
  std::uint32_t free_blocks_ = 0;
};

}  // namespace umem::arena
