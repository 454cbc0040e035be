// Small blocks: a two-level segregated fit (TLSF, Masmano et al. 2004) over 2 MiB segments, with
// all bookkeeping outside the memory that it manages, since that may be on the device.
// Allocation and release take constant time; neighbours that are free are joined at once.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
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
  // Units of a block of `units` units, or no block when no segment has room.
  struct Block {
    RangeId segment = managed::kNoRange;
    std::uint32_t offset = 0;  // in units
  };
  Block allocate(std::uint32_t units, std::uint32_t requested_bytes);
  // Adds a segment, all free.
  void add(RangeId segment);
  // Takes a segment out that is all free.
  void remove(RangeId segment);
  // Units of the live block that starts at `offset`; 0 if none does.
  std::uint32_t units_at(RangeId segment, std::uint32_t offset) const;
  std::uint32_t requested_at(RangeId segment, std::uint32_t offset) const;
  // Appends all blocks of the segment, free and not, by address.
  void describe(RangeId segment, std::uintptr_t base, std::vector<BlockRow>& out) const;
  // Free blocks of all segments.
  std::uint32_t free_blocks() const { return free_blocks_; }
  void free(RangeId segment, std::uint32_t offset);
  // Asserts that chunks fill their segments and that the bins hold the free ones. A full scan.
  // Returns the free units.
  std::size_t check_invariants() const;

 private:
  static constexpr unsigned kFirstLevels = 12, kSecondBits = 3, kSecondLevels = 1u << kSecondBits;
  using ChunkId = std::uint32_t;  // 0 is none

  struct Chunk {
    RangeId segment = managed::kNoRange;
    std::uint32_t offset = 0, units = 0, requested = 0;
    ChunkId before = 0, after = 0;  // neighbours in the segment
    ChunkId prev = 0, next = 0;     // neighbours in the bin
    bool free = false;
  };
  struct Bin {
    unsigned first, second;
  };
  static Bin bin_of(std::uint32_t units);
  Bin search(std::uint32_t units) const;  // first == kFirstLevels: nothing fits
  ChunkId take_chunk_id();
  void insert(ChunkId id);
  void extract(ChunkId id);
  void split(ChunkId id, std::uint32_t units);
  ChunkId join(ChunkId left, ChunkId right);

  std::vector<Chunk> chunks_{1};
  std::vector<ChunkId> unused_ids_;
  std::array<std::array<ChunkId, kSecondLevels>, kFirstLevels> bins_{};
  std::uint32_t first_map_ = 0, free_blocks_ = 0;
  std::array<std::uint32_t, kFirstLevels> second_map_{};
  std::vector<std::vector<ChunkId>> starts_;  // by segment: the chunk that starts at each unit
};

}  // namespace umem::arena
