#include "base/range_maximum.h"

#include <algorithm>
#include <bit>

namespace umem {

void RangeMaximum::reset(std::span<const std::int64_t> values, std::size_t times) {
  leaves_ = std::bit_ceil(std::max<std::size_t>(times * values.size(), 1));
  max_.assign(2 * leaves_, kNothing);
  added_.assign(2 * leaves_, 0);
  auto leaf = max_.begin() + static_cast<std::ptrdiff_t>(leaves_);
  for (std::size_t time = 0; time < times; ++time) leaf = std::ranges::copy(values, leaf).out;
  for (std::size_t node = leaves_; node-- > 1;)
    max_[node] = std::max(max_[2 * node], max_[2 * node + 1]);
}

std::int64_t RangeMaximum::max(std::size_t begin, std::size_t end) const {
  if (begin >= end) return kNothing;
  // Ascends from both ends; a parent's addition applies to everything found below it so far.
  std::int64_t left = kNothing, right = kNothing;
  std::size_t low = begin + leaves_, high = end - 1 + leaves_;
  if (low == high) {
    left = max_[low];
  } else {
    left = max_[low];
    right = max_[high];
    for (; low / 2 != high / 2; low /= 2, high /= 2) {
      if (low % 2 == 0) left = std::max(left, max_[low + 1]);
      if (high % 2 == 1) right = std::max(right, max_[high - 1]);
      left += added_[low / 2];
      right += added_[high / 2];
    }
    left = std::max(left, right);
  }
  for (low /= 2; low > 0; low /= 2) left += added_[low];
  return left;
}

void RangeMaximum::add(std::size_t begin, std::size_t end, std::int64_t amount) {
  if (begin >= end) return;
  const auto whole = [&](std::size_t node) {
    max_[node] += amount;
    added_[node] += amount;
  };
  std::size_t low = begin + leaves_, high = end + leaves_;
  for (; low < high; low /= 2, high /= 2) {
    if (low % 2 == 1) whole(low++);
    if (high % 2 == 1) whole(--high);
  }
  const auto refresh = [&](std::size_t node) {
    for (node /= 2; node > 0; node /= 2)
      max_[node] = std::max(max_[2 * node], max_[2 * node + 1]) + added_[node];
  };
  refresh(begin + leaves_);
  refresh(end - 1 + leaves_);
}

std::optional<std::size_t> RangeMaximum::last_above(std::size_t begin, std::size_t end,
                                                    std::int64_t bound) const {
  if (begin >= end) return std::nullopt;
  return last_above({.number = 1, .begin = 0, .end = leaves_, .added = 0}, begin, end, bound);
}

std::optional<std::size_t> RangeMaximum::last_above(Node node, std::size_t begin, std::size_t end,
                                                    std::int64_t bound) const {
  if (node.end <= begin || end <= node.begin || max_[node.number] + node.added <= bound)
    return std::nullopt;
  if (node.number >= leaves_) return node.begin;
  const std::size_t middle = (node.begin + node.end) / 2;
  const std::int64_t added = node.added + added_[node.number];
  if (auto right = last_above({2 * node.number + 1, middle, node.end, added}, begin, end, bound))
    return right;
  return last_above({2 * node.number, node.begin, middle, added}, begin, end, bound);
}

}  // namespace umem
