#include "policy/plan_cursor.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace umem::policy {
namespace {

// The number of consecutive ops on small blocks alone that may be missing or additional.
constexpr std::size_t kMaxStrays = 64;
// Bytes of segments that ops bring in where the plan has no use of them may be one in so many bytes
// that the plan evicts, or that ops use if it only orders what leaves. Without such a limit, a plan
// moved four times lru's bytes.
constexpr std::size_t kOfEvicted = 8, kOfUsed = 40;

}  // namespace

PlanCursor::PlanCursor(Plan plan, const std::vector<RangeId>& units)
    : plan_(std::move(plan)), shapes_(plan_) {
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
  std::size_t using_bytes = 0, leaving = 0;
  for (std::size_t op = 0; op < n_ops(); ++op)
    for (const std::int64_t used : plan_.used_by(op)) {
      const auto tensor = static_cast<std::size_t>(used);
      if (!is_segment(static_cast<Tensor>(tensor))) signature_[op] += mixed(tensor);
      using_bytes += static_cast<std::size_t>(plan_.bytes[tensor]);
      use_op_[fill[tensor]++] = static_cast<std::uint32_t>(op);
    }
  for (const std::int64_t t : plan_.evict_tensor)
    leaving += static_cast<std::size_t>(plan_.bytes[static_cast<std::size_t>(t)]);
  max_misplaced_bytes_ = leaving > 0 ? leaving / kOfEvicted : using_bytes / kOfUsed;
  first_use_.assign(m, kNever);
  next_step_use_.assign(m, kNever);
  for (std::size_t t = 0; t < m; ++t)
    if (use_start_[t] < use_start_[t + 1]) first_use_[t] = use_op_[use_start_[t]];
  counts_from_.assign(m, 0);
  for (std::int64_t t : plan_.allocations)
    counts_from_[static_cast<std::size_t>(t)] = first_use_[static_cast<std::size_t>(t)];
  for (std::size_t t = 0; t < m; ++t) {  // for a made tensor, the first use of the carried one
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

void PlanCursor::lose() {
  lost_ = true;
  for (Tensor tensor : adopted_) unbind(tensor);  // it may have been a wrong guess
  adopted_.clear();
}

// An allocation of another size may still be the plan's, in a step of another length. If it is not,
// the ops show it.
void PlanCursor::admitted(RangeId id, std::size_t bytes) {
  unbind(tensor_of(id));
  // No op of the plan has more.
  if (allocated_.size() <= plan_.allocations.size()) allocated_.push_back({id, bytes});
  if (lost_) return;
  if (next_allocation_ == plan_.allocations.size()) return lose();
  const auto tensor = static_cast<Tensor>(plan_.allocations[next_allocation_]);
  if (static_cast<std::size_t>(plan_.bytes[index(tensor)]) != bytes) ++resized_;
  ++next_allocation_;
  bind(tensor, id);
}

void PlanCursor::retired(RangeId id) {
  unbind(tensor_of(id));
  for (Block& block : allocated_)
    if (block.id == id) block.id = kNoRange;
}

bool PlanCursor::is_allocated(RangeId id) const {
  return std::any_of(allocated_.begin(), allocated_.end(),
                     [&](const Block& block) { return block.id == id; });
}

// A segment is identified by its address, whatever the program did before.
void PlanCursor::segment_admitted(RangeId id) {
  unbind(tensor_of(id));
  if (id < home_of_.size() && home_of_[id] != kNoTensor) bind(home_of_[id], id);
}

void PlanCursor::forgotten(RangeId id) {
  retired(id);
  if (id < home_of_.size()) home_of_[id] = kNoTensor;
}

// Matches a unit that the op uses and the plan does not know with a tensor of the plan's op: one of
// the same bytes that was live when the step began and whose unit is unknown. This happens with a
// tensor carried over from a step that was not followed, or a persistent one that moved.
bool PlanCursor::adopt(const CandidateView& view, RangeId id, std::size_t op) {
  if (op == n_ops()) return false;
  for (const std::int64_t used : plan_.used_by(op)) {
    const auto tensor = static_cast<Tensor>(used);
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

// The plan's next op on a large tensor; n_ops() if there is none.
std::size_t PlanCursor::next_large_op() const {
  std::size_t op = next_op_;
  while (op < n_ops() && on_segments(op)) ++op;
  return op;
}

// The plan's next op of this name on segments alone, before the next op on a large tensor and not
// too far ahead; n_ops() if there is none.
std::size_t PlanCursor::next_like(std::int64_t name) const {
  const std::size_t end = std::min(n_ops(), next_op_ + kMaxStrays);
  for (std::size_t op = next_op_; op < end && on_segments(op); ++op)
    if (plan_.op[op] == name) return op;
  return n_ops();
}

// An op with large tensors is identified by them, and one on segments alone by its name. A few of
// the latter may be missing or additional, for example those of an occasional report.
Followed PlanCursor::op_ended(const CandidateView& view, const OpUse& used, bool search) {
  const RangeId* const ids = used.ids;
  if (lost_) {
    if (search && !too_misplaced()) return find_again(view, used);
    allocated_.clear();
    last_shape_ = 0;
    return Followed::kNone;
  }
  ++ops_;
  const auto is_large = [&](RangeId id) { return view.live(id) && !view.ledger.at(id).segment; };
  const bool large = std::any_of(ids, ids + used.count, is_large);
  const std::size_t expected = large ? next_large_op() : next_op_;
  std::uint64_t signature = 0;
  bool counted = false;
  for (std::size_t i = 0; i < used.count; ++i) {
    if (!view.live(ids[i])) continue;
    if (tensor_of(ids[i]) == kNoTensor) {
      const bool segment = view.ledger.at(ids[i]).segment;
      if (segment) segment_admitted(ids[i]);  // it was allocated before this plan
      if (segment && tensor_of(ids[i]) == kNoTensor) continue;
      if (!segment && !adopt(view, ids[i], expected)) return find_again(view, used);
    }
    const Tensor tensor = tensor_of(ids[i]);
    const std::size_t t = index(tensor);
    if (static_cast<std::int64_t>(expected) < counts_from_[t] || seen_[t] == ops_) continue;
    seen_[t] = ops_;
    counted = true;
    if (!is_segment(tensor)) signature += mixed(t);
  }
  if (!counted) return Followed::kNone;
  const std::size_t op = signature != 0 ? expected : next_like(used.name);
  if (op == n_ops() || signature_[op] != signature) {
    if (signature != 0) return find_again(view, used);
    if (++strays_ > kMaxStrays) lose();
    return Followed::kMiss;
  }
  strays_ = 0;
  allocated_.clear();
  if (has_segments()) count_misplaced(view, used, op);
  since_ = view.ledger.now();
  while (next_op_ <= op) pass_op();
  if (!too_misplaced()) return Followed::kHit;
  lose();
  return Followed::kMiss;
}

// Counts what the op, which is the plan's, brought in of segments that the plan has for other ops.
void PlanCursor::count_misplaced(const CandidateView& view, const OpUse& used, std::size_t op) {
  const auto planned = plan_.used_by(op);
  for (std::size_t i = 0; i < used.count; ++i) {
    const RangeId id = used.ids[i];
    const Tensor tensor = view.live(id) ? tensor_of(id) : kNoTensor;
    if (tensor == kNoTensor || !is_segment(tensor)) continue;
    const residency::Unit& unit = view.ledger.at(id);
    const bool came = unit.host_bytes > 0 && unit.first_use > since_;
    if (came && std::find(planned.begin(), planned.end(), tensor) == planned.end() &&
        std::find(used.ids, used.ids + i, id) == used.ids + i)
      misplaced_bytes_ += unit.bytes;
  }
}

// The program has its small blocks at other places than in the plan, which moves what the program
// is about to use. A plan for a step that fits moves nothing, whatever its order.
bool PlanCursor::too_misplaced() const {
  return misplaced_bytes_ > max_misplaced_bytes_ && !leaves_victims_to_lru(plan_) &&
         (plan_.gated == 0 || moves_anything(plan_));
}

// The op is not the one that the plan expects, or the cursor is already lost. The program continues
// at the first later op that looks like this one: the next one, one that uses the same persistent
// tensors, or one after an op that looks like the program's previous op. Unexpected ops that only
// use their own allocations show nothing.
Followed PlanCursor::find_again(const CandidateView& view, const OpUse& used) {
  const RangeId* const ids = used.ids;
  OpShape shape(used.name);
  std::vector<RangeId> others;
  bool anchored = false, small = true;
  for (std::size_t i = 0; i < used.count; ++i) {
    if (!view.live(ids[i]) || view.ledger.at(ids[i]).segment) continue;
    small = false;
    if (std::find(ids, ids + i, ids[i]) != ids + i || is_allocated(ids[i])) continue;
    const Tensor tensor = tensor_of(ids[i]);
    if (tensor != kNoTensor && is_persistent(tensor)) {
      shape.add_persistent(tensor);
      anchored = true;
    } else {
      shape.add_other(view.ledger.at(ids[i]).bytes);
      others.push_back(ids[i]);
    }
  }
  if (small) return Followed::kNone;
  const std::size_t expected = next_large_op();
  if (others.empty() && !anchored) {
    lose();
    return Followed::kMiss;
  }
  for (const Block& block : allocated_) shape.add_allocated(block.bytes);
  std::size_t op = n_ops();
  if (!lost_ && expected < n_ops() && shapes_.of(expected) == shape.value())
    op = expected;
  else if (anchored)
    op = shapes_.first(shape.value(), next_op_);
  else
    op = shapes_.first(last_shape_, shape.value(), next_op_);
  if (op == n_ops()) {
    lose();
    last_shape_ = shape.value();
    allocated_.clear();
    return Followed::kMiss;
  }
  go_on_at(view, op, others);
  return Followed::kHit;
}

// Binds the program's units to the op's tensors; among several of equal bytes this is a guess.
void PlanCursor::go_on_at(const CandidateView& view, std::size_t op, std::vector<RangeId>& others) {
  const auto [begin, end] = shapes_.allocations(op);
  std::vector<Tensor> free;
  for (const std::int64_t used : plan_.used_by(op)) free.push_back(static_cast<Tensor>(used));
  std::erase_if(free, [&](Tensor t) { return is_segment(t) || is_persistent(t); });
  for (std::size_t i = begin; i < end; ++i) {
    const auto tensor = static_cast<Tensor>(plan_.allocations[i]);
    std::erase(free, tensor);
    if (i - begin < allocated_.size() && allocated_[i - begin].id != kNoRange)
      bind(tensor, allocated_[i - begin].id);
  }
  std::erase_if(others, [&](RangeId id) { return std::erase(free, tensor_of(id)) > 0; });
  for (RangeId id : others) {
    const auto same = std::find_if(free.begin(), free.end(), [&](Tensor t) {
      return static_cast<std::size_t>(plan_.bytes[index(t)]) == view.ledger.at(id).bytes;
    });
    if (same == free.end()) continue;  // two shapes are equal only by chance
    bind(*same, id);
    free.erase(same);
  }
  next_allocation_ = end;
  lost_ = false;
  strays_ = 0;
  ++detours_;
  allocated_.clear();
  while (next_op_ <= op) pass_op();
}

// The plan's next op is over.
void PlanCursor::pass_op() {
  for (const std::int64_t used : plan_.used_by(next_op_)) {
    const std::size_t t = index(static_cast<Tensor>(used));
    UMEM_ASSERT(next_use_[t] < use_start_[t + 1], "an op uses what the plan has uses left of");
    ++next_use_[t];
  }
  if (!on_segments(next_op_)) last_shape_ = shapes_.of(next_op_);
  ++next_op_;
}

// True if everything that counts occurred: at most a few of the last ops, on small blocks alone,
// are missing.
bool PlanCursor::at_end() const {
  const std::size_t left = n_ops() - next_op_;
  return next_large_op() == n_ops() && left <= kMaxStrays && 8 * left <= n_ops();
}

bool PlanCursor::step_ended() {
  const bool complete = !lost_ && detours_ == 0 && resized_ == 0 && at_end() &&
                        next_allocation_ == plan_.allocations.size();
  for (std::size_t t = 0; t < plan_.bytes.size(); ++t) {
    if (static_cast<Kind>(plan_.kind[t]) != Kind::kCarried) continue;
    const RangeId id =
        plan_.next_alias[t] >= 0 ? unit_of(static_cast<Tensor>(plan_.next_alias[t])) : kNoRange;
    unbind(static_cast<Tensor>(t));
    if (id != kNoRange) bind(static_cast<Tensor>(t), id);
  }
  for (std::size_t t = 0; t < plan_.bytes.size(); ++t) {
    const auto kind = static_cast<Kind>(plan_.kind[t]);
    if (is_segment(static_cast<Tensor>(t))) continue;  // it is bound while it is live
    if (kind == Kind::kTransient || kind == Kind::kMade) unbind(static_cast<Tensor>(t));
  }
  restart();
  return complete;
}

void PlanCursor::restart() {
  lost_ = false;
  next_op_ = next_allocation_ = strays_ = detours_ = resized_ = 0;
  misplaced_bytes_ = 0;
  last_shape_ = 0;
  next_use_.assign(use_start_.begin(), use_start_.end() - 1);
  adopted_.clear();
  allocated_.clear();
}

}  // namespace umem::policy
