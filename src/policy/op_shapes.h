// Shapes of a plan's ops, independent of the units that they use. A program that left its plan is
// found again by them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "policy/plan.h"

namespace umem::policy {

using Tensor = std::int32_t;

// splitmix64: its sums over different sets are equal only by chance.
constexpr std::uint64_t mixed(std::uint64_t x) {
  x = (x + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The shape of one op: its name, the persistent tensors that it uses, the sizes of its other large
// tensors in any order, and the sizes of its allocations in their order.
class OpShape {
 public:
  explicit OpShape(std::int64_t name) : sum_(mixed(static_cast<std::uint64_t>(name))) {}
  void add_persistent(Tensor tensor) { sum_ += mixed(~static_cast<std::uint64_t>(tensor)); }
  void add_other(std::size_t bytes) { sum_ += mixed(bytes); }
  void add_allocated(std::size_t bytes) { order_ = mixed(order_ ^ bytes); }
  std::uint64_t value() const { return mixed(sum_ ^ order_); }

 private:
  std::uint64_t sum_, order_ = 0;
};

class OpShapes {
 public:
  // Segments of small blocks do not count: their contents are unknown.
  explicit OpShapes(const Plan& plan);

  std::uint64_t of(std::size_t op) const { return shape_[op]; }
  // The first op at `from` or later that has this shape, or that directly follows an op of shape
  // `before` (ops on segments alone are skipped); the number of ops if there is none.
  std::size_t first(std::uint64_t shape, std::size_t from) const;
  std::size_t first(std::uint64_t before, std::uint64_t shape, std::size_t from) const;
  // The op's range among the allocations, [first, last).
  std::pair<std::size_t, std::size_t> allocations(std::size_t op) const {
    return {allocation_start_[op], allocation_start_[op + 1]};
  }

 private:
  std::vector<std::uint64_t> shape_;
  std::vector<std::size_t> allocation_start_;
  // Sorted by shape, and by pair. A step may have nearly as many shapes as ops: one vector for all
  // is several times as fast to make and free as a map of vectors.
  std::vector<std::pair<std::uint64_t, std::uint32_t>> ops_;
};

}  // namespace umem::policy
