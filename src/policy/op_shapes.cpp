#include "policy/op_shapes.h"

#include <algorithm>

namespace umem::policy {
namespace {

std::uint64_t pair_of(std::uint64_t before, std::uint64_t shape) {
  return mixed(before) + shape;
}

}  // namespace

OpShapes::OpShapes(const Plan& plan) {
  const auto n = static_cast<std::size_t>(plan.n_ops);
  allocation_start_.assign(n + 1, 0);
  for (std::int64_t op : plan.allocated) ++allocation_start_[static_cast<std::size_t>(op) + 1];
  for (std::size_t op = 0; op < n; ++op) allocation_start_[op + 1] += allocation_start_[op];
  std::vector<std::int64_t> allocated(plan.bytes.size(), -1);
  for (std::size_t i = 0; i < plan.allocations.size(); ++i)
    allocated[static_cast<std::size_t>(plan.allocations[i])] = plan.allocated[i];
  const auto bytes = [&](std::size_t t) { return static_cast<std::size_t>(plan.bytes[t]); };
  std::uint64_t before = 0;
  for (std::size_t op = 0; op < n; ++op) {
    OpShape shape(plan.op[op]);
    bool large = false;
    for (const std::int64_t tensor : plan.used_by(op)) {
      const auto t = static_cast<std::size_t>(tensor);
      if (plan.segment[t] != 0) continue;
      large = true;
      if (plan.kind[t] == static_cast<std::int64_t>(Kind::kPersistent))
        shape.add_persistent(static_cast<Tensor>(t));
      else if (allocated[t] != static_cast<std::int64_t>(op))
        shape.add_other(bytes(t));
    }
    for (std::size_t i = allocation_start_[op]; i < allocation_start_[op + 1]; ++i)
      shape.add_allocated(bytes(static_cast<std::size_t>(plan.allocations[i])));
    shape_.push_back(shape.value());
    if (!large) continue;
    ops_.emplace_back(shape.value(), static_cast<std::uint32_t>(op));
    ops_.emplace_back(pair_of(before, shape.value()), static_cast<std::uint32_t>(op));
    before = shape.value();
  }
  std::sort(ops_.begin(), ops_.end());
}

std::size_t OpShapes::first(std::uint64_t shape, std::size_t from) const {
  const std::pair sought(shape, static_cast<std::uint32_t>(from));
  const auto at = std::lower_bound(ops_.begin(), ops_.end(), sought);
  return at == ops_.end() || at->first != shape ? shape_.size() : at->second;
}

std::size_t OpShapes::first(std::uint64_t before, std::uint64_t shape, std::size_t from) const {
  return first(pair_of(before, shape), from);
}

}  // namespace umem::policy
