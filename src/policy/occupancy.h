// Bytes that a plan has on the device at each op of this step and the next: range maximum and range
// addition in O(log n), by a segment tree.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace umem::policy {

class Occupancy {
 public:
  // The step's bytes at each op, twice over: an op of the next step is at `step.size()` and beyond.
  void reset(const std::vector<std::int64_t>& step);
  // Of the ops from `begin` up to `end`; 0 where there is none.
  std::int64_t most(std::size_t begin, std::size_t end) const;
  void add(std::size_t begin, std::size_t end, std::int64_t bytes);

 private:
  std::size_t leaves_ = 0;  // a power of two
  // Of each node: the most under it, with what was added to all of it but not to its parents'.
  std::vector<std::int64_t> most_, added_;
};

}  // namespace umem::policy
