#include "arena/segment_pool.h"

#include <algorithm>
#include <bit>

#include "base/assert.h"

namespace umem::arena {
namespace {

constexpr std::uint32_t kWord = 64;
// A settled segment has at most this much free: little, because nothing uses it.
constexpr std::uint32_t kSettledFree = kSegmentUnits / 4;

std::uint32_t units_of(std::uint32_t bytes) {
  return static_cast<std::uint32_t>((bytes + kUnit - 1) / kUnit);
}

}  // namespace

std::uint32_t SegmentPool::next(const Segment& segment, std::uint32_t from, bool used) {
  for (std::uint32_t word = from / kWord; word < segment.used.size(); ++word) {
    std::uint64_t bits = used ? segment.used[word] : ~segment.used[word];
    if (word == from / kWord) bits &= ~std::uint64_t{0} << (from % kWord);
    if (bits != 0) return word * kWord + static_cast<std::uint32_t>(std::countr_zero(bits));
  }
  return kSegmentUnits;
}

std::uint32_t SegmentPool::run_start(const Segment& segment, std::uint32_t end) {
  while (end > 0) {
    const std::uint32_t word = (end - 1) / kWord, top = end - word * kWord;  // 1 to 64 of its bits
    const std::uint64_t bits = segment.used[word] << (kWord - top);
    if (bits != 0) return end - static_cast<std::uint32_t>(std::countl_zero(bits));
    end = word * kWord;
  }
  return 0;
}

void SegmentPool::mark(Segment& segment, std::uint32_t from, std::uint32_t units, bool used) {
  for (const std::uint32_t end = from + units; from < end;) {
    const std::uint32_t bit = from % kWord, count = std::min(kWord - bit, end - from);
    const std::uint64_t bits = (~std::uint64_t{0} >> (kWord - count)) << bit;
    std::uint64_t& word = segment.used[from / kWord];
    UMEM_ASSERT((word & bits) == (used ? 0 : bits),
                "a block takes what is free, and gives it back");
    word = used ? word | bits : word & ~bits;
    from += count;
  }
}

SegmentPool::Block SegmentPool::allocate(std::uint32_t requested_bytes) {
  const std::uint32_t units = units_of(requested_bytes);
  for (Seat& seat : seats_) {
    if (seat.settled || seat.longest < units) continue;
    Segment& segment = *segments_[seat.segment];
    std::uint32_t longest = 0;
    for (std::uint32_t begin = next(segment, 0, false), end; begin < kSegmentUnits;
         begin = next(segment, end, false)) {
      end = next(segment, begin, true);
      longest = std::max(longest, end - begin);
      if (end - begin < units) continue;
      mark(segment, begin, units, true);
      segment.requested[begin] = requested_bytes;
      segment.free_units -= units;
      if (end - begin == units) --free_blocks_;
      return {seat.segment, begin};
    }
    seat.longest = longest;
  }
  return {};
}

void SegmentPool::add(RangeId segment) {
  if (segments_.size() <= segment) segments_.resize(segment + 1);
  segments_[segment] = std::make_unique<Segment>();
  segments_[segment]->requested.assign(kSegmentUnits, 0);
  segments_[segment]->seat = seats_.size();
  seats_.push_back({segment});
  ++free_blocks_;
}

void SegmentPool::remove(RangeId segment) {
  UMEM_ASSERT(segments_[segment]->free_units == kSegmentUnits,
              "a segment that is removed is all free");
  const std::size_t seat = segments_[segment]->seat;
  seats_.erase(seats_.begin() + static_cast<std::ptrdiff_t>(seat));
  for (std::size_t later = seat; later < seats_.size(); ++later)
    segments_[seats_[later].segment]->seat = later;
  segments_[segment].reset();
  --free_blocks_;
}

std::uint32_t SegmentPool::units_at(RangeId segment, std::uint32_t offset) const {
  return units_of(segments_[segment]->requested[offset]);
}

std::uint32_t SegmentPool::requested_at(RangeId segment, std::uint32_t offset) const {
  return segments_[segment]->requested[offset];
}

void SegmentPool::describe(RangeId segment, std::uintptr_t base, std::vector<BlockRow>& out) const {
  const Segment& all = *segments_[segment];
  for (std::uint32_t at = 0, end; at < kSegmentUnits; at = end) {
    const std::uint32_t units = units_at(segment, at);
    end = units > 0 ? at + units : next(all, at, true);
    out.push_back({base + at * kUnit, (end - at) * kUnit, all.requested[at], units > 0, units > 0});
  }
}

void SegmentPool::free(RangeId segment, std::uint32_t offset) {
  Segment& its = *segments_[segment];
  const std::uint32_t units = units_of(its.requested[offset]);
  UMEM_ASSERT(units > 0, "a live block starts where one is freed");
  mark(its, offset, units, false);
  its.requested[offset] = 0;
  its.free_units += units;
  const std::uint32_t begin = run_start(its, offset), end = next(its, offset + units, true);
  free_blocks_ += 1u - (begin < offset ? 1u : 0u) - (end > offset + units ? 1u : 0u);
  Seat& seat = seats_[its.seat];
  seat.longest = std::max(seat.longest, end - begin);
  if (its.free_units > kSettledFree) seat.settled = false;
}

void SegmentPool::step_ended() {
  for (Seat& seat : seats_) seat.settled = segments_[seat.segment]->free_units <= kSettledFree;
}

std::size_t SegmentPool::check_invariants() const {
  if constexpr (!kAsserts) return 0;
  std::size_t free_units = 0, free_blocks = 0;
  for (std::size_t i = 0; i < seats_.size(); ++i) {
    const Segment& segment = *segments_[seats_[i].segment];
    UMEM_ASSERT(segment.seat == i, "a segment knows its seat");
    std::uint32_t its_free = 0;
    bool after_free = false;
    std::vector<BlockRow> blocks;
    describe(seats_[i].segment, 0, blocks);
    for (const BlockRow& block : blocks) {
      const auto units = static_cast<std::uint32_t>(block.bytes / kUnit);
      const auto at = static_cast<std::uint32_t>(block.address / kUnit);
      if (block.allocated) {
        UMEM_ASSERT(next(segment, at, false) >= at + units, "all units of a block are used");
        after_free = false;
        continue;
      }
      UMEM_ASSERT(!after_free, "every used unit is in a block");
      UMEM_ASSERT(units <= seats_[i].longest, "no free run is longer than its seat says");
      after_free = true;
      its_free += units;
      ++free_blocks;
    }
    UMEM_ASSERT(its_free == segment.free_units, "the free units are counted");
    UMEM_ASSERT(!seats_[i].settled || its_free <= kSettledFree, "a settled segment is nearly full");
    free_units += its_free;
  }
  UMEM_ASSERT(free_blocks == free_blocks_, "the free blocks are counted");
  return free_units;
}

}  // namespace umem::arena
