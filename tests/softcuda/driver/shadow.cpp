#include "shadow.h"

#include <algorithm>
#include <iterator>

namespace softcuda {
namespace {

void meet(const Mark& earlier, const Clock& clock, std::uintptr_t begin, std::uintptr_t end,
          const Shadow::Met& met) {
  if (earlier.tick != 0 && (earlier.use == Use::kFree || !earlier.before(clock)))
    met(earlier, begin, end);
}

bool leaves_bytes_alone(Use use) {
  return use == Use::kRead || use == Use::kMove;
}

}  // namespace

void Clock::set(StrandId strand, Tick tick) {
  if (strand >= ticks_.size()) ticks_.resize(strand + 1);
  ticks_[strand] = tick;
}

void Clock::join(const Clock& other) {
  if (other.ticks_.size() > ticks_.size()) ticks_.resize(other.ticks_.size());
  for (std::size_t i = 0; i < other.ticks_.size(); ++i)
    ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
}

void Shadow::enter(const Access& access, const Mark& mark, const Clock& clock, const Met& met) {
  if (access.begin >= access.end) return;
  const auto first = split(access.begin), last = split(access.end);
  for (auto at = first; at != last; ++at) {
    const auto& [begin, segment] = *at;
    meet(segment.last, clock, begin, segment.end, met);
    for (const Mark& use : segment.uses) meet(use, clock, begin, segment.end, met);
  }
  if (leaves_bytes_alone(mark.use))
    add_use(first, last, access, mark, clock);
  else
    replace(first, last, access, mark);
}

void Shadow::replace(Segments::iterator first, Segments::iterator last, const Access& access,
                     const Mark& mark) {
  if (first != last && std::next(first) == last && first->first == access.begin &&
      first->second.end == access.end) {  // the same bytes again: no new node
    first->second.last = mark;
    first->second.uses.clear();
    return;
  }
  const auto next = segments_.erase(first, last);
  segments_.emplace_hint(next, access.begin, Segment{access.end, mark, {}});
}

void Shadow::add_use(Segments::iterator first, Segments::iterator last, const Access& access,
                     const Mark& mark, const Clock& clock) {
  std::uintptr_t at = access.begin;
  for (auto segment = first; segment != last; ++segment) {
    if (at < segment->first)
      segments_.emplace_hint(segment, at, Segment{segment->first, {}, {mark}});
    // Work after this use is after those that it knows.
    std::erase_if(segment->second.uses, [&](const Mark& use) { return use.before(clock); });
    segment->second.uses.push_back(mark);
    at = segment->second.end;
  }
  if (at < access.end) segments_.emplace_hint(last, at, Segment{access.end, {}, {mark}});
}

void Shadow::forget(std::uintptr_t begin, std::uintptr_t end) {
  const auto first = split(begin), last = split(end);
  segments_.erase(first, last);
}

void Shadow::prune(const Clock& clock) {
  std::erase_if(segments_, [&](const auto& item) {
    const Segment& segment = item.second;
    return segment.last.use != Use::kFree && segment.last.before(clock) &&
           std::all_of(segment.uses.begin(), segment.uses.end(),
                       [&](const Mark& use) { return use.before(clock); });
  });
}

// The first segment that begins at or after `at`; a segment that contains `at` is split.
Shadow::Segments::iterator Shadow::split(std::uintptr_t at) {
  const auto next = segments_.lower_bound(at);
  if (next == segments_.begin()) return next;
  const auto before = std::prev(next);
  if (before->second.end <= at) return next;
  const auto second = segments_.emplace_hint(next, at, before->second);
  before->second.end = at;
  return second;
}

}  // namespace softcuda
