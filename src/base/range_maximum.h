// A column of integers with addition to ranges and maxima of ranges, each in O(log n), by a segment
// tree.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

namespace umem {

class RangeMaximum {
 public:
  // Below all values, also after additions.
  static constexpr std::int64_t kNothing = std::numeric_limits<std::int64_t>::min() / 2;

  RangeMaximum() = default;
  explicit RangeMaximum(std::span<const std::int64_t> values, std::size_t times = 1) {
    reset(values, times);
  }
  // The values, repeated `times` times.
  void reset(std::span<const std::int64_t> values, std::size_t times = 1);
  // Ranges are [begin, end); kNothing for empty ranges.
  std::int64_t max(std::size_t begin, std::size_t end) const;
  void add(std::size_t begin, std::size_t end, std::int64_t amount);
  // The last place in the range whose value exceeds `bound`.
  std::optional<std::size_t> last_above(std::size_t begin, std::size_t end,
                                        std::int64_t bound) const;
  std::int64_t at(std::size_t place) const { return max(place, place + 1); }

 private:
  struct Node {
    std::size_t number, begin, end;  // the root is 1; its range of places
    std::int64_t added;              // added to all of its parents
  };
  std::optional<std::size_t> last_above(Node node, std::size_t begin, std::size_t end,
                                        std::int64_t bound) const;

  std::size_t leaves_ = 0;  // a power of two
  // For each node: the maximum below it, including additions to the node, but not to its parents.
  std::vector<std::int64_t> max_, added_;
};

}  // namespace umem
