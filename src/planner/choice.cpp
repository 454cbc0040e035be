#include "planner/choice.h"

#include <algorithm>
#include <cstddef>

#include "base/range_maximum.h"

namespace umem::planner {
namespace {

// The bytes over the capacity while gaps are taken and returned.
class Over {
 public:
  Over(const GapPlaces& gaps, Ints over) : gaps_(gaps), over_(over) {}

  // Takes the gap, if an op in it is over by at least this much.
  bool leave(std::int64_t gap, std::int64_t min) {
    if (max_over(gap) < min) return false;
    add(gap, -bytes(gap));
    return true;
  }
  // Returns the gap, if all ops in it have room.
  bool keep(std::int64_t gap) {
    if (max_over(gap) > -bytes(gap)) return false;
    add(gap, bytes(gap));
    return true;
  }
  std::int64_t bytes(std::int64_t gap) const { return at(gaps_.bytes, gap); }

 private:
  static std::int64_t at(Ints column, std::int64_t gap) {
    return column[static_cast<std::size_t>(gap)];
  }
  std::size_t place(Ints column, std::int64_t gap) const {
    return static_cast<std::size_t>(at(column, gap));
  }
  std::int64_t max_over(std::int64_t gap) const {
    return std::max(over_.max(place(gaps_.begin, gap), place(gaps_.end, gap)),
                    over_.max(0, place(gaps_.wrap, gap)));
  }
  void add(std::int64_t gap, std::int64_t amount) {
    over_.add(place(gaps_.begin, gap), place(gaps_.end, gap), amount);
    over_.add(0, place(gaps_.wrap, gap), amount);
  }

  const GapPlaces& gaps_;
  RangeMaximum over_;
};

}  // namespace

std::vector<std::int64_t> choose(const GapPlaces& gaps, Ints over, Ints order) {
  Over now(gaps, over);
  std::vector<std::int64_t> left, later;
  for (const std::int64_t gap : order)
    (now.leave(gap, now.bytes(gap)) ? left : later).push_back(gap);
  for (const std::int64_t gap : later)
    if (now.leave(gap, 1)) left.push_back(gap);
  const auto idle_us = [&](std::int64_t gap) {
    return gaps.idle_us[static_cast<std::size_t>(gap)];
  };
  std::ranges::sort(left, [&](std::int64_t a, std::int64_t b) {
    return idle_us(a) != idle_us(b) ? idle_us(a) < idle_us(b) : a > b;
  });
  std::erase_if(left, [&](std::int64_t gap) { return now.keep(gap); });
  return left;
}

}  // namespace umem::planner
