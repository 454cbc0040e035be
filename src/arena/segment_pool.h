// Small blocks: first fit by address (Wilson, Johnstone, Neely and Boles, "Dynamic storage
// allocation: a survey and critical review", IWMM 1995) over 2 MiB segments. All bookkeeping is
// outside of the managed memory, which may be on the device.
//
// Segments move as a whole, so it matters which blocks share one. With first fit, blocks that are
// allocated in turn lie side by side, at places that depend on the live blocks and not on the order
// of releases: steps that repeat get the same addresses. A segment that is nearly full at the end
// of a step takes no more blocks: the holes among weights are not filled with blocks that live for
// one op.
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
  // The place of a block, or none if no segment has room; the offset is in units.
  struct Block {
    RangeId segment = managed::kNoRange;
    std::uint32_t offset = 0;
  };
  // `requested_bytes` > 0.
  Block allocate(std::uint32_t requested_bytes);
  // Adds a segment, all free.
  void add(RangeId segment);
  // Removes a segment that is all free.
  void remove(RangeId segment);
  // The units of the live block that starts at `offset`; 0 if there is none.
  std::uint32_t units_at(RangeId segment, std::uint32_t offset) const;
  std::uint32_t requested_at(RangeId segment, std::uint32_t offset) const;
  // Appends all blocks of the segment, live and free, by address.
  void describe(RangeId segment, std::uintptr_t base, std::vector<BlockRow>& out) const;
  std::size_t segments() const { return seats_.size(); }
  // Free blocks of all segments.
  std::uint32_t free_blocks() const { return free_blocks_; }
  void free(RangeId segment, std::uint32_t offset);
  // Settles the segments that are nearly full now, as long as they stay so.
  void step_ended();
  // Asserts that the sums agree with the blocks. A full scan. Returns the free units.
  std::size_t check_invariants() const;

 private:
  struct Segment {
    std::array<std::uint64_t, kSegmentUnits / 64> used{};  // one bit per unit
    std::vector<std::uint32_t> requested;  // by unit: size of the block that starts there
    std::uint32_t free_units = kSegmentUnits;
    std::size_t seat = 0;
  };
  struct Seat {  // used by the search
    RangeId segment = managed::kNoRange;
    std::uint32_t longest = kSegmentUnits;  // upper bound of free runs
    bool settled = false;
  };
  // The first used, or free, unit at `from` or later; the end of the segment if there is none.
  static std::uint32_t next(const Segment& segment, std::uint32_t from, bool used);
  // The begin of the free run that ends before `end`.
  static std::uint32_t run_start(const Segment& segment, std::uint32_t end);
  static void mark(Segment& segment, std::uint32_t from, std::uint32_t units, bool used);

  std::vector<std::unique_ptr<Segment>> segments_;  // by id
  std::vector<Seat> seats_;                         // in the order in which they were added
  std::uint32_t free_blocks_ = 0;
};

}  // namespace umem::arena
