#include "policy/occupancy.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace umem::policy {
namespace {

constexpr std::int64_t kNothing = std::numeric_limits<std::int64_t>::min() / 2;

}  // namespace

void Occupancy::reset(const std::vector<std::int64_t>& step) {
  const std::size_t n = step.size();
  leaves_ = std::bit_ceil(std::max<std::size_t>(2 * n, 1));
  most_.assign(2 * leaves_, kNothing);
  added_.assign(2 * leaves_, 0);
  for (std::size_t i = 0; i < n; ++i) most_[leaves_ + i] = most_[leaves_ + n + i] = step[i];
  for (std::size_t node = leaves_; node-- > 1;)
    most_[node] = std::max(most_[2 * node], most_[2 * node + 1]);
}

std::int64_t Occupancy::most(std::size_t begin, std::size_t end) const {
  if (begin >= end) return 0;
  // From both ends up; what was added to a parent holds for all that was found below it so far.
  std::int64_t left = kNothing, right = kNothing;
  std::size_t low = begin + leaves_, high = end - 1 + leaves_;
  if (low == high) {
    left = most_[low];
  } else {
    left = most_[low];
    right = most_[high];
    for (; low / 2 != high / 2; low /= 2, high /= 2) {
      if (low % 2 == 0) left = std::max(left, most_[low + 1]);
      if (high % 2 == 1) right = std::max(right, most_[high - 1]);
      left += added_[low / 2];
      right += added_[high / 2];
    }
    left = std::max(left, right);
  }
  for (low /= 2; low > 0; low /= 2) left += added_[low];
  return left;
}

void Occupancy::add(std::size_t begin, std::size_t end, std::int64_t bytes) {
  if (begin >= end) return;
  const auto whole = [&](std::size_t node) {
    most_[node] += bytes;
    added_[node] += bytes;
  };
  std::size_t low = begin + leaves_, high = end + leaves_;
  for (; low < high; low /= 2, high /= 2) {
    if (low % 2 == 1) whole(low++);
    if (high % 2 == 1) whole(--high);
  }
  const auto refresh = [&](std::size_t node) {
    for (node /= 2; node > 0; node /= 2)
      most_[node] = std::max(most_[2 * node], most_[2 * node + 1]) + added_[node];
  };
  refresh(begin + leaves_);
  refresh(end - 1 + leaves_);
}

}  // namespace umem::policy
