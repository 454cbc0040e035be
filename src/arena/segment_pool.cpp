#include "arena/segment_pool.h"

#include <bit>

#include "base/assert.h"

namespace umem::arena {

SegmentPool::Bin SegmentPool::bin_of(std::uint32_t units) {
  if (units < kSecondLevels) return {0, units};
  const auto top = static_cast<unsigned>(std::bit_width(units)) - 1;
  return {top - kSecondBits + 1, (units >> (top - kSecondBits)) & (kSecondLevels - 1)};
}

// The first bin whose every chunk holds `units`, at or above the size.
SegmentPool::Bin SegmentPool::search(std::uint32_t units) const {
  if (units >= kSecondLevels) {
    const auto top = static_cast<unsigned>(std::bit_width(units)) - 1;
    units += (1u << (top - kSecondBits)) - 1;
  }
  auto [first, second] = bin_of(units);
  std::uint32_t map = second_map_[first] & (~0u << second);
  if (map == 0) {
    const std::uint32_t above = first + 1 < 32 ? first_map_ & (~0u << (first + 1)) : 0;
    if (above == 0) return {kFirstLevels, 0};
    first = static_cast<unsigned>(std::countr_zero(above));
    map = second_map_[first];
  }
  return {first, static_cast<unsigned>(std::countr_zero(map))};
}

SegmentPool::ChunkId SegmentPool::take_chunk_id() {
  if (unused_ids_.empty()) {
    chunks_.emplace_back();
    return static_cast<ChunkId>(chunks_.size() - 1);
  }
  const ChunkId id = unused_ids_.back();
  unused_ids_.pop_back();
  chunks_[id] = {};
  return id;
}

void SegmentPool::insert(ChunkId id) {
  Chunk& chunk = chunks_[id];
  const auto [first, second] = bin_of(chunk.units);
  ChunkId& head = bins_[first][second];
  UMEM_ASSERT(!chunk.free && head != id, "a free chunk is in one bin, once");
  chunk.free = true;
  ++free_blocks_;
  chunk.prev = 0;
  chunk.next = head;
  if (head) chunks_[head].prev = id;
  head = id;
  first_map_ |= 1u << first;
  second_map_[first] |= 1u << second;
}

void SegmentPool::extract(ChunkId id) {
  Chunk& chunk = chunks_[id];
  const auto [first, second] = bin_of(chunk.units);
  ChunkId& head = bins_[first][second];
  UMEM_ASSERT(chunk.free && (chunk.prev ? chunks_[chunk.prev].next : head) == id,
              "the bin holds the free chunk");
  if (chunk.next) chunks_[chunk.next].prev = chunk.prev;
  (chunk.prev ? chunks_[chunk.prev].next : head) = chunk.next;
  chunk.free = false;
  --free_blocks_;
  if (head) return;
  second_map_[first] &= ~(1u << second);
  if (second_map_[first] == 0) first_map_ &= ~(1u << first);
}

// Cuts `id` down to `units`; what is left over becomes a free chunk.
void SegmentPool::split(ChunkId id, std::uint32_t units) {
  UMEM_ASSERT(units > 0 && units <= chunks_[id].units,
              "the bin holds chunks that are large enough");
  if (chunks_[id].units == units) return;
  const ChunkId rest = take_chunk_id();  // may move chunks_
  Chunk& left = chunks_[id];
  Chunk& right = chunks_[rest];
  right.segment = left.segment;
  right.offset = left.offset + units;
  right.units = left.units - units;
  right.before = id;
  right.after = left.after;
  if (right.after) chunks_[right.after].before = rest;
  left.after = rest;
  left.units = units;
  starts_[right.segment][right.offset] = rest;
  insert(rest);
}

// Two neighbours, neither in a bin, become one.
SegmentPool::ChunkId SegmentPool::join(ChunkId left, ChunkId right) {
  Chunk& kept = chunks_[left];
  const Chunk& gone = chunks_[right];
  UMEM_ASSERT(kept.after == right && gone.before == left && kept.segment == gone.segment,
              "neighbours are joined");
  UMEM_ASSERT(!kept.free && !gone.free, "no chunk in a bin is joined");
  kept.units += gone.units;
  kept.after = gone.after;
  if (kept.after) chunks_[kept.after].before = left;
  starts_[gone.segment][gone.offset] = 0;
  unused_ids_.push_back(right);
  return left;
}

SegmentPool::Block SegmentPool::allocate(std::uint32_t units, std::uint32_t requested_bytes) {
  const Bin bin = search(units);
  if (bin.first == kFirstLevels) return {};
  const ChunkId id = bins_[bin.first][bin.second];
  extract(id);
  split(id, units);
  chunks_[id].requested = requested_bytes;
  return {chunks_[id].segment, chunks_[id].offset};
}

void SegmentPool::add(RangeId segment) {
  if (starts_.size() <= segment) starts_.resize(segment + 1);
  starts_[segment].assign(kSegmentUnits, 0);
  const ChunkId id = take_chunk_id();
  chunks_[id].segment = segment;
  chunks_[id].units = kSegmentUnits;
  starts_[segment][0] = id;
  insert(id);
}

void SegmentPool::remove(RangeId segment) {
  const ChunkId id = starts_[segment][0];
  UMEM_ASSERT(chunks_[id].free && chunks_[id].units == kSegmentUnits,
              "a segment that is removed is all free");
  extract(id);
  unused_ids_.push_back(id);
  starts_[segment] = {};
}

std::uint32_t SegmentPool::units_at(RangeId segment, std::uint32_t offset) const {
  const ChunkId id = starts_[segment][offset];
  return id && !chunks_[id].free ? chunks_[id].units : 0;
}

std::uint32_t SegmentPool::requested_at(RangeId segment, std::uint32_t offset) const {
  return chunks_[starts_[segment][offset]].requested;
}

void SegmentPool::describe(RangeId segment, std::uintptr_t base, std::vector<BlockRow>& out) const {
  for (ChunkId id = starts_[segment][0]; id; id = chunks_[id].after) {
    const Chunk& chunk = chunks_[id];
    out.push_back({base + chunk.offset * kUnit, chunk.units * kUnit,
                   chunk.free ? 0 : chunk.requested, !chunk.free, !chunk.free});
  }
}

void SegmentPool::free(RangeId segment, std::uint32_t offset) {
  ChunkId id = starts_[segment][offset];
  UMEM_ASSERT(id != 0 && !chunks_[id].free, "a live block starts where one is freed");
  if (const ChunkId after = chunks_[id].after; after && chunks_[after].free) {
    extract(after);
    id = join(id, after);
  }
  if (const ChunkId before = chunks_[id].before; before && chunks_[before].free) {
    extract(before);
    id = join(before, id);
  }
  insert(id);
}

std::size_t SegmentPool::check_invariants() const {
  if constexpr (!kAsserts) return 0;
  std::size_t binned = 0, free_chunks = 0, free_units = 0;
  for (unsigned first = 0; first < kFirstLevels; ++first)
    for (unsigned second = 0; second < kSecondLevels; ++second) {
      const ChunkId head = bins_[first][second];
      UMEM_ASSERT((head != 0) == ((second_map_[first] >> second & 1) != 0),
                  "the map has the bins that are not empty");
      for (ChunkId id = head; id != 0; id = chunks_[id].next, ++binned) {
        const Bin bin = bin_of(chunks_[id].units);
        UMEM_ASSERT(chunks_[id].free, "a bin holds no live block");
        UMEM_ASSERT(bin.first == first && bin.second == second,
                    "a chunk is in the bin of its size");
        UMEM_ASSERT(binned < chunks_.size(), "a bin has each chunk once");
      }
    }
  for (const std::vector<ChunkId>& starts : starts_) {
    if (starts.empty()) continue;
    std::uint32_t end = 0;
    bool after_free = false;
    for (ChunkId id = starts[0]; id != 0; id = chunks_[id].after) {
      const Chunk& chunk = chunks_[id];
      UMEM_ASSERT(chunk.offset == end && starts[end] == id,
                  "chunks fill their segment without gaps");
      UMEM_ASSERT(!(chunk.free && after_free), "free neighbours are joined");
      after_free = chunk.free;
      end += chunk.units;
      free_chunks += chunk.free ? 1 : 0;
      free_units += chunk.free ? chunk.units : 0;
    }
    UMEM_ASSERT(end == kSegmentUnits, "chunks fill their segment");
  }
  UMEM_ASSERT(binned == free_chunks && free_chunks == free_blocks_,
              "the bins hold all free chunks");
  return free_units;
}

}  // namespace umem::arena
