// The victims under memory pressure while a plan is followed.
#include <algorithm>
#include <queue>
#include <utility>

#include "policy/planned.h"
#include "policy/policies.h"

namespace umem::policy {
namespace {

// The later a class, the more it is spared.
enum class Class : int { kPlain, kUnknown, kSoon, kKept, kSmall, kCount };

}  // namespace

// Those that the plan calls cold; then the rest in its order, what it does not know after what it
// does, then what the next ops use, what it keeps, and last what is too small to be worth a move.
void Planned::victims(const CandidateView& view, std::size_t need,
                      std::vector<RangeId>& out) const {
  if (!active_) return lru_->victims(view, need, out);
  const PlanCursor& cursor = active_->cursor;
  const PlanSchedule& schedule = active_->schedule;
  const Plan& plan = cursor.plan();
  const auto order = static_cast<Order>(plan.order);
  const auto take = [&](RangeId id) {
    out.push_back(id);
    need -= std::min(need, view.ledger.at(id).bytes);
  };
  const auto is_cold = [&](RangeId id) {
    const Tensor tensor = cursor.tensor_of(id);
    return tensor != kNoTensor && schedule.cold(tensor);
  };
  const auto class_of = [&](RangeId id) {
    const Tensor tensor = cursor.tensor_of(id);
    const residency::Unit& unit = view.ledger.at(id);
    const bool planned = unit.segment && tensor != kNoTensor;
    if (!planned && !view.worth_moving(unit)) return Class::kSmall;
    if (tensor == kNoTensor) return order == Order::kFurthest ? Class::kUnknown : Class::kPlain;
    if (active_->keep[static_cast<std::size_t>(tensor)]) return Class::kKept;
    const std::int64_t next = cursor.next_use(tensor);
    // The op that has just ended may be within another, which uses what that one made until it
    // frees it: operators on mixed types convert their inputs so.
    if (next == kNever && cursor.just_used(tensor)) return Class::kSoon;
    const auto soon = static_cast<std::int64_t>(cursor.next_op()) + plan.window;
    return next < soon ? Class::kSoon : Class::kPlain;
  };
  // Smaller goes first. By last use they come in the right order already.
  const auto rank = [&](RangeId id) -> std::int64_t {
    const Tensor tensor = cursor.tensor_of(id);
    const auto first = static_cast<std::int64_t>(view.ledger.at(id).first_use);
    if (order == Order::kFifo) return first == 0 ? kNever : first;
    return tensor == kNoTensor ? 0 : -cursor.next_use(tensor);
  };

  for (Tensor tensor : schedule.cold()) {
    const RangeId id = cursor.unit_of(tensor);
    if (need == 0) return;
    if (id != kNoRange && schedule.cold(tensor) && view.evictable(id) &&
        std::find(out.begin(), out.end(), id) == out.end())
      take(id);
  }
  for (int now = 0; now < static_cast<int>(Class::kCount) && need > 0; ++now) {
    std::vector<std::pair<std::int64_t, std::size_t>> found;  // rank, and place in `ids`
    std::vector<RangeId> ids;
    for (RangeId id = view.ledger.oldest_resident(); id != kNoRange && need > 0;
         id = view.ledger.at(id).newer) {
      if (!view.evictable(id) || is_cold(id) || static_cast<int>(class_of(id)) != now) continue;
      if (order == Order::kLru) {
        take(id);
        continue;
      }
      found.emplace_back(rank(id), ids.size());
      ids.push_back(id);
    }
    std::priority_queue first(std::greater<>(), std::move(found));
    for (; !first.empty() && need > 0; first.pop()) take(ids[first.top().second]);
  }
}

}  // namespace umem::policy
