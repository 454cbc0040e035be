#include "arena/layout.h"

#include <map>
#include <string>
#include <utility>

namespace umem::arena {
namespace {

using backing::kNoRange;

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

Result<std::unique_ptr<Layout>> Layout::make(backing::RangeTable& ranges,
                                             const driver::Place& place,
                                             const std::vector<LayoutEntry>& entries,
                                             std::size_t bytes) {
  UMEM_RETURN_IF_ERROR(check(entries, bytes));
  std::unique_ptr<Layout> made(new Layout(ranges));
  Result<RangeId> range = ranges.create(bytes, place, bytes);
  if (!range.ok()) return range.take_status();
  made->range_ = range.value();
  made->add_views(entries);
  return made;
}

// Entries at one place have one view.
void Layout::add_views(const std::vector<LayoutEntry>& entries) {
  std::map<std::pair<std::size_t, std::size_t>, RangeId> known;
  for (const LayoutEntry& entry : entries) {
    entries_.push_back({entry.bytes, kNoRange});
    if (entry.offset == kNoPlace) continue;
    RangeId& view = known[{entry.offset, entry.bytes}];
    if (view == kNoRange) {
      view = ranges_.add_view(range_, entry.offset, entry.bytes);
      views_.push_back(view);
    }
    entries_.back().view = view;
  }
}

RangeId Layout::take(std::size_t bytes, cu::CUstream stream) {
  if (!armed_ || retired_) return kNoRange;
  if (!bound_) stream_ = stream;
  bound_ = true;
  const bool as_planned =
      next_ < entries_.size() && entries_[next_].bytes == bytes && stream == stream_;
  const RangeId view = as_planned ? entries_[next_].view : kNoRange;
  if (!as_planned || (view != kNoRange && !ranges_.unseen(view, range_))) {
    armed_ = false;
    ++misses_;
    return kNoRange;
  }
  ++next_;
  if (view == kNoRange) return kNoRange;
  ++hits_;
  ++taken_;
  ranges_.show_view(view);
  return view;
}

void Layout::give_back(RangeId view) {
  --taken_;
  ranges_.hide_view(view, range_);
}

void Layout::step_ended() {
  followed_ = armed_ && next_ == entries_.size();
  if (armed_ && !followed_ && next_ > 0) ++misses_;  // it ended early
  armed_ = true;
  next_ = 0;
}

Status Layout::destroy(const driver::Place& place) {
  UMEM_RETURN_IF_ERROR(ranges_.destroy(range_, place));
  for (RangeId view : views_) ranges_.remove_view(view);
  return {};
}

LayoutStatus Layout::status() const {
  const backing::Range& range = ranges_[range_];
  return {entries_.size(), range.bytes, hits_, misses_, followed_, range.base, stream_};
}

}  // namespace umem::arena
