#include "arena/layout.h"

#include <map>
#include <string>
#include <utility>

#include "base/assert.h"

namespace umem::arena {
namespace {

using managed::kNoRange;

Status check(const std::vector<LayoutEntry>& entries, std::size_t bytes) {
  const auto whole = [](std::size_t n) { return n % kPageBytes == 0; };
  bool good = bytes > 0 && whole(bytes);
  for (const LayoutEntry& entry : entries) {
    good = good && entry.bytes > 0 && whole(entry.bytes);
    if (entry.offset == kNoPlace) continue;
    good =
        good && whole(entry.offset) && entry.offset <= bytes && entry.bytes <= bytes - entry.offset;
  }
  if (good) return {};
  return {Code::kInvalidArgument,
          "a layout is of whole pages of 2 MiB, within its " + std::to_string(bytes) + " bytes"};
}

}  // namespace

Result<std::unique_ptr<Layout>> Layout::make(managed::RangeTable& ranges,
                                             const driver::Place& place,
                                             const std::vector<LayoutEntry>& entries,
                                             std::size_t bytes) {
  UMEM_RETURN_IF_ERROR(check(entries, bytes));
  std::unique_ptr<Layout> made(new Layout(ranges));
  Result<RangeId> range = ranges.create(bytes, place, bytes);
  if (!range.ok()) return range.take_status();
  made->range_ = range.value();
  made->add_subranges(entries);
  return made;
}

// Entries at the same place share a subrange.
void Layout::add_subranges(const std::vector<LayoutEntry>& entries) {
  std::map<std::pair<std::size_t, std::size_t>, RangeId> known;
  for (const LayoutEntry& entry : entries) {
    entries_.push_back({entry.bytes, kNoRange});
    if (entry.offset == kNoPlace) continue;
    RangeId& subrange = known[{entry.offset, entry.bytes}];
    if (subrange == kNoRange) {
      subrange = ranges_.add_subrange(range_, entry.offset, entry.bytes);
      subranges_.push_back(subrange);
    }
    entries_.back().subrange = subrange;
  }
}

RangeId Layout::take(std::size_t bytes, cu::CUstream stream) {
  if (!armed_ || retired_) return kNoRange;
  if (!bound_) stream_ = stream;
  bound_ = true;
  const bool as_planned =
      next_ < entries_.size() && entries_[next_].bytes == bytes && stream == stream_;
  const RangeId subrange = as_planned ? entries_[next_].subrange : kNoRange;
  if (!as_planned || (subrange != kNoRange && !ranges_.unseen(subrange, range_))) {
    armed_ = false;
    ++misses_;
    return kNoRange;
  }
  UMEM_ASSERT(next_ < entries_.size(), "the next entry is one of the layout");
  ++next_;
  if (subrange == kNoRange) return kNoRange;
  ++hits_;
  ++taken_;
  ranges_.show_subrange(subrange);
  return subrange;
}

void Layout::give_back(RangeId subrange) {
  UMEM_ASSERT(taken_ > 0, "a place is given back by the block that took it");
  --taken_;
  ranges_.hide_subrange(subrange, range_);
}

void Layout::step_ended() {
  followed_ = armed_ && next_ == entries_.size();
  if (armed_ && !followed_ && next_ > 0) ++misses_;  // it ended early
  armed_ = true;
  next_ = 0;
}

Status Layout::destroy(const driver::Place& place, managed::Freer* freer) {
  UMEM_ASSERT(idle(), "a layout outlives the blocks in it");
  UMEM_RETURN_IF_ERROR(ranges_.destroy(range_, place, freer));
  for (RangeId subrange : subranges_) ranges_.remove_subrange(subrange);
  return {};
}

LayoutStatus Layout::status() const {
  const managed::Range& range = ranges_[range_];
  return {
      retired_ ? 0 : entries_.size(), range.bytes, hits_, misses_, followed_, range.base, stream_};
}

}  // namespace umem::arena
