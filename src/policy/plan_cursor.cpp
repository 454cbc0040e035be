#include "policy/plan_cursor.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace umem::policy {
namespace {

// splitmix64: sums of it over different sets of tensors are equal by chance only.
std::uint64_t mixed(Tensor tensor) {
  std::uint64_t x = (static_cast<std::uint64_t>(tensor) + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Ops on small blocks alone that may be missing, or come in addition, one after the other.
constexpr std::size_t kMaxStrays = 64;

}  // namespace

PlanCursor::PlanCursor(Plan plan, const std::vector<RangeId>& units) : plan_(std::move(plan)) {
  const std::size_t m = plan_.bytes.size();
  index_uses();
  unit_of_.assign(m, kNoRange);
  life_.assign(m, 0);
  seen_.assign(m, 0);
  for (std::size_t t = 0; t < m; ++t) {
    if (units[t] == kNoRange) continue;
    const auto tensor = static_cast<Tensor>(t);
    const auto kind = static_cast<Kind>(plan_.kind[t]);
    const bool from_begin = kind == Kind::kPersistent || kind == Kind::kCarried;
    if (is_segment(tensor) && kind != Kind::kCarried) {
      if (home_of_.size() <= units[t]) home_of_.resize(units[t] + 1, kNoTensor);
      home_of_[units[t]] = tensor;
    }
    if ((!is_segment(tensor) || from_begin) && tensor_of(units[t]) == kNoTensor)
      bind(tensor, units[t]);
  }
  restart();
}

std::vector<RangeId> PlanCursor::units() const {
  std::vector<RangeId> units = unit_of_;
  for (RangeId id = 0; id < home_of_.size(); ++id) {
    if (home_of_[id] == kNoTensor) continue;
    const std::size_t t = index(home_of_[id]);
    if (static_cast<Kind>(plan_.kind[t]) != Kind::kPersistent) units[t] = id;
  }
  return units;
}

void PlanCursor::index_uses() {
  const std::size_t m = plan_.bytes.size();
  signature_.assign(n_ops(), 0);
  use_start_.assign(m + 1, 0);
  for (std::int64_t t : plan_.access_tensor) ++use_start_[static_cast<std::size_t>(t) + 1];
  for (std::size_t t = 0; t < m; ++t) use_start_[t + 1] += use_start_[t];
  use_op_.resize(plan_.access_tensor.size());
  std::vector<std::size_t> fill(use_start_.begin(), use_start_.end() - 1);
  for (std::size_t op = 0; op < n_ops(); ++op)
    for (auto at = static_cast<std::size_t>(plan_.access_start[op]);
         at < static_cast<std::size_t>(plan_.access_start[op + 1]); ++at) {
      const auto tensor = static_cast<std::size_t>(plan_.access_tensor[at]);
      if (!is_segment(static_cast<Tensor>(tensor)))
        signature_[op] += mixed(static_cast<Tensor>(tensor));
      use_op_[fill[tensor]++] = static_cast<std::uint32_t>(op);
    }
  first_use_.assign(m, kNever);
  next_step_use_.assign(m, kNever);
  for (std::size_t t = 0; t < m; ++t)
    if (use_start_[t] < use_start_[t + 1]) first_use_[t] = use_op_[use_start_[t]];
  counts_from_.assign(m, 0);
  for (std::int64_t t : plan_.allocations)
    counts_from_[static_cast<std::size_t>(t)] = first_use_[static_cast<std::size_t>(t)];
  for (std::size_t t = 0; t < m; ++t) {  // of a made tensor it is the first use of the carried one
    const bool persistent = plan_.kind[t] == static_cast<std::int64_t>(Kind::kPersistent);
    const std::size_t who =
        persistent ? t : static_cast<std::size_t>(std::max<std::int64_t>(plan_.next_alias[t], 0));
    if ((persistent || plan_.next_alias[t] >= 0) && first_use_[t] != kNever)
      next_step_use_[who] = plan_.n_ops + first_use_[t];
  }
}

std::int64_t PlanCursor::next_use(Tensor tensor) const {
  const std::size_t t = index(tensor);
  UMEM_ASSERT(use_start_[t] <= next_use_[t] && next_use_[t] <= use_start_[t + 1],
              "the cursor is among the tensor's uses");
  return next_use_[t] < use_start_[t + 1] ? use_op_[next_use_[t]] : next_step_use_[t];
}

void PlanCursor::bind(Tensor tensor, RangeId id) {
  unbind(tensor_of(id));
  unbind(tensor);
  if (tensor_of_.size() <= id) tensor_of_.resize(id + 1, kNoTensor);
  tensor_of_[id] = tensor;
  unit_of_[index(tensor)] = id;
  ++life_[index(tensor)];
}

void PlanCursor::unbind(Tensor tensor) {
  if (tensor == kNoTensor) return;
  const RangeId id = std::exchange(unit_of_[index(tensor)], kNoRange);
  if (id == kNoRange) return;
  UMEM_ASSERT(tensor_of_[id] == tensor, "a unit and its tensor name each other");
  tensor_of_[id] = kNoTensor;
  ++life_[index(tensor)];
}

void PlanCursor::diverge() {
  alive_ = false;
  for (Tensor tensor : adopted_) unbind(tensor);  // it may have been a wrong guess
  adopted_.clear();
}

void PlanCursor::admitted(RangeId id, std::size_t bytes) {
  unbind(tensor_of(id));
  if (!alive_) return;
  if (next_allocation_ == plan_.allocations.size()) return diverge();
  const auto tensor = static_cast<Tensor>(plan_.allocations[next_allocation_]);
  if (static_cast<std::size_t>(plan_.bytes[index(tensor)]) != bytes) return diverge();
  ++next_allocation_;
  bind(tensor, id);
}

// Whatever the program did before, a segment is known by its place.
void PlanCursor::segment_admitted(RangeId id) {
  unbind(tensor_of(id));
  if (id < home_of_.size() && home_of_[id] != kNoTensor) bind(home_of_[id], id);
}

void PlanCursor::forgotten(RangeId id) {
  unbind(tensor_of(id));
  if (id < home_of_.size()) home_of_[id] = kNoTensor;
}

// A unit that the op uses and the plan does not know: the one that the op uses by the plan, of the
// same bytes, and that was alive when the step began, if its unit is not known. A tensor carried
// over from a step that was not followed, or a persistent one that moved.
bool PlanCursor::adopt(const CandidateView& view, RangeId id, std::size_t op) {
  if (op == n_ops()) return false;
  for (auto at = static_cast<std::size_t>(plan_.access_start[op]);
       at < static_cast<std::size_t>(plan_.access_start[op + 1]); ++at) {
    const auto tensor = static_cast<Tensor>(plan_.access_tensor[at]);
    const auto kind = static_cast<Kind>(plan_.kind[index(tensor)]);
    if (unit_of(tensor) != kNoRange || is_segment(tensor) ||
        (kind != Kind::kPersistent && kind != Kind::kCarried) ||
        static_cast<std::size_t>(plan_.bytes[index(tensor)]) != view.ledger.at(id).bytes)
      continue;
    bind(tensor, id);
    adopted_.push_back(tensor);
    return true;
  }
  return false;
}

// The plan's next op on a large tensor; n_ops(): there is none.
std::size_t PlanCursor::next_large_op() const {
  std::size_t op = next_op_;
  while (op < n_ops() && on_segments(op)) ++op;
  return op;
}

// The plan's next op of this name, on segments alone: before the next one on a large tensor, and
// not too far. n_ops(): there is none.
std::size_t PlanCursor::next_like(std::int64_t name) const {
  const std::size_t end = std::min(n_ops(), next_op_ + kMaxStrays);
  for (std::size_t op = next_op_; op < end && on_segments(op); ++op)
    if (plan_.op[op] == name) return op;
  return n_ops();
}

// An op with large tensors is known by them, and one on segments alone by its name. Of the latter a
// few may be missing, or come in addition, such as those of a report that is printed now and then.
Followed PlanCursor::op_ended(const CandidateView& view, const RangeId* ids, std::size_t count,
                              std::int64_t name) {
  if (!alive_) return Followed::kNone;
  ++ops_;
  const auto is_large = [&](RangeId id) { return view.live(id) && !view.ledger.at(id).segment; };
  const bool large = std::any_of(ids, ids + count, is_large);
  const std::size_t expected = large ? next_large_op() : next_op_;
  std::uint64_t signature = 0;
  bool counted = false;
  for (std::size_t i = 0; i < count; ++i) {
    if (!view.live(ids[i])) continue;
    if (tensor_of(ids[i]) == kNoTensor) {
      const bool segment = view.ledger.at(ids[i]).segment;
      if (segment) segment_admitted(ids[i]);  // it came to life before this plan
      if (segment && tensor_of(ids[i]) == kNoTensor) continue;
      if (!segment && !adopt(view, ids[i], expected)) {
        diverge();
        return Followed::kMiss;
      }
    }
    const Tensor tensor = tensor_of(ids[i]);
    const std::size_t t = index(tensor);
    if (static_cast<std::int64_t>(expected) < counts_from_[t] || seen_[t] == ops_) continue;
    seen_[t] = ops_;
    counted = true;
    if (!is_segment(tensor)) signature += mixed(tensor);
  }
  if (!counted) return Followed::kNone;
  const std::size_t op = signature != 0 ? expected : next_like(name);
  if (op == n_ops() || signature_[op] != signature) {
    if (signature != 0 || ++strays_ > kMaxStrays) diverge();
    return Followed::kMiss;
  }
  strays_ = 0;
  while (next_op_ <= op) pass_op();
  return Followed::kHit;
}

// The plan's next op is over.
void PlanCursor::pass_op() {
  for (auto at = static_cast<std::size_t>(plan_.access_start[next_op_]);
       at < static_cast<std::size_t>(plan_.access_start[next_op_ + 1]); ++at) {
    const std::size_t t = index(static_cast<Tensor>(plan_.access_tensor[at]));
    UMEM_ASSERT(next_use_[t] < use_start_[t + 1], "an op uses what the plan has uses left of");
    ++next_use_[t];
  }
  ++next_op_;
}

// All that counts was there: at most a few of the last ops, on small blocks alone, were not.
bool PlanCursor::at_end() const {
  const std::size_t left = n_ops() - next_op_;
  return next_large_op() == n_ops() && left <= kMaxStrays && 8 * left <= n_ops();
}

bool PlanCursor::step_ended() {
  const bool complete = alive_ && at_end() && next_allocation_ == plan_.allocations.size();
  for (std::size_t t = 0; t < plan_.bytes.size(); ++t) {
    if (static_cast<Kind>(plan_.kind[t]) != Kind::kCarried) continue;
    const RangeId id =
        plan_.next_alias[t] >= 0 ? unit_of(static_cast<Tensor>(plan_.next_alias[t])) : kNoRange;
    unbind(static_cast<Tensor>(t));
    if (id != kNoRange) bind(static_cast<Tensor>(t), id);
  }
  for (std::size_t t = 0; t < plan_.bytes.size(); ++t) {
    const auto kind = static_cast<Kind>(plan_.kind[t]);
    if (is_segment(static_cast<Tensor>(t))) continue;  // it is bound as long as it is alive
    if (kind == Kind::kTransient || kind == Kind::kMade) unbind(static_cast<Tensor>(t));
  }
  restart();
  return complete;
}

void PlanCursor::restart() {
  alive_ = true;
  next_op_ = next_allocation_ = strays_ = 0;
  next_use_.assign(use_start_.begin(), use_start_.end() - 1);
  adopted_.clear();
}

}  // namespace umem::policy
