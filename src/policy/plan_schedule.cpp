#include "policy/plan_schedule.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace umem::policy {

// A stable counting sort: items after the same op keep the plan's order. Nothing is due after the
// last op's point.
PlanSchedule::OpIndex::OpIndex(const Ints& after, std::size_t n_ops)
    : start(n_ops + 2, 0), item(after.size()) {
  const auto n = static_cast<std::int64_t>(n_ops);
  for (std::int64_t op : after)
    if (op < n) ++start[static_cast<std::size_t>(op + 2)];
  for (std::size_t i = 1; i < start.size(); ++i) start[i] += start[i - 1];
  std::vector<std::size_t> fill(start);
  for (std::size_t i = 0; i < after.size(); ++i)
    if (after[i] < n) item[fill[static_cast<std::size_t>(after[i] + 1)]++] = i;
}

namespace {

constexpr std::uint64_t kInnerOps = 8;  // ops after an inner one in which its result may be used

// Requests due before op N are issued right after op N-1, and an op of the next step counts like
// one of this step. 2 * n_ops: never.
Ints before(const Ints& ops, std::int64_t n_ops) {
  Ints after;
  for (std::int64_t op : ops) after.push_back(op == 2 * n_ops ? n_ops : op % n_ops - 1);
  return after;
}

}  // namespace

PlanSchedule::PlanSchedule(const PlanCursor& cursor)
    : cursor_(cursor),
      evictions_(cursor.plan().evict_after, cursor.n_ops()),
      colds_(cursor.plan().cold_after, cursor.n_ops()),
      fetches_(cursor.plan().fetch_after, cursor.n_ops()),
      write_backs_(cursor.plan().copy_after, cursor.n_ops()),
      write_back_ends_(before(cursor.plan().copy_until, cursor.plan().n_ops), cursor.n_ops()),
      waits_after_(cursor.n_ops() + 1, false),
      evict_{{}, std::vector<bool>(cursor.plan().bytes.size(), false)},
      cold_{{}, std::vector<bool>(cursor.plan().bytes.size(), false)},
      evict_mark_(cursor.plan().bytes.size(), 0),
      cold_mark_(cursor.plan().bytes.size(), 0),
      fetch_mark_(cursor.plan().bytes.size(), 0),
      returned_(cursor.plan().bytes.size(), -1) {
  const Plan& plan = cursor.plan();
  for (std::size_t i = 0; i < plan.fetch_tensor.size(); ++i)
    returns_.emplace_back(static_cast<Tensor>(plan.fetch_tensor[i]), plan.fetch_by[i] % plan.n_ops);
  std::sort(returns_.begin(), returns_.end());
  for (std::int64_t op : cursor.plan().waits) waits_after_[static_cast<std::size_t>(op + 1)] = true;
  step_began(false);
}

void PlanSchedule::step_began(bool continues) {
  const auto n = static_cast<std::int64_t>(cursor_.n_ops());
  for (; continues && done_ < cursor_.n_ops(); ++done_)
    add_due(done_ + 1);  // ops that were left out
  std::vector<Fetch> carried;
  while (const Fetch* next = head()) {
    if (continues && next->by >= n && !stale(*next)) carried.push_back(*next);
    drop_head();
  }
  if (!continues) {
    ahead_.clear();
    write_back_.clear();
    std::fill(evict_mark_.begin(), evict_mark_.end(), 0);
    std::fill(cold_mark_.begin(), cold_mark_.end(), 0);
  }
  evict_.drop_if([&](Tensor tensor) { return !marked(evict_mark_, tensor); });
  cold_.drop_if([&](Tensor tensor) { return !cold(tensor); });
  if (gated()) {
    occupancy_.reset(cursor_.plan().occupancy, 2);
    for (Fetch& fetch : ahead_)
      occupancy_.add(0, static_cast<std::size_t>(fetch.by - n),
                     cursor_.plan().bytes[index(fetch.tensor)]);
  }
  ahead_.clear();
  for (Fetch& fetch : carried) {
    fetch.by -= n;
    request_fetch(fetch);
  }
  done_ = 0;
  started_bytes_ = 0;
  waits_ = false;
  add_due(0);
}

void PlanSchedule::op_ended() {
  const Plan& plan = cursor_.plan();
  waits_ = false;
  started_bytes_ = 0;
  UMEM_ASSERT(done_ < cursor_.next_op() && cursor_.next_op() <= cursor_.n_ops(), "an op ended");
  for (; done_ < cursor_.next_op(); ++done_) {
    // Operands are no longer cold, and earlier evictions of them are cancelled.
    for (const std::int64_t used : plan.used_by(done_)) {
      const auto tensor = static_cast<Tensor>(used);
      cold_mark_[index(tensor)] = evict_mark_[index(tensor)] = 0;
      returned_[index(tensor)] = -1;
    }
    add_due(done_ + 1);
  }
}

void PlanSchedule::add_due(std::size_t point) {
  UMEM_ASSERT(point <= cursor_.n_ops(), "the point is one of the plan");
  const Plan& plan = cursor_.plan();
  const auto each = [&](const OpIndex& index, auto act) {
    for (std::size_t at = index.start[point]; at < index.start[point + 1]; ++at)
      act(index.item[at]);
  };
  each(evictions_, [&](std::size_t i) {
    const auto tensor = static_cast<Tensor>(plan.evict_tensor[i]);
    evict_.add(tensor);
    mark(evict_mark_, tensor);
  });
  each(colds_, [&](std::size_t i) {
    const auto tensor = static_cast<Tensor>(plan.cold_tensor[i]);
    cold_.add(tensor);
    mark(cold_mark_, tensor);
  });
  each(fetches_, [&](std::size_t i) {
    const auto tensor = static_cast<Tensor>(plan.fetch_tensor[i]);
    request_fetch({tensor, cursor_.life(tensor), plan.fetch_by[i], ++turn_});
  });
  each(write_backs_, [&](std::size_t i) {
    const auto tensor = static_cast<Tensor>(plan.copy_tensor[i]);
    write_back_.push_back({tensor, cursor_.life(tensor)});
  });
  each(write_back_ends_,
       [&](std::size_t i) { end_write_back_.push_back(static_cast<Tensor>(plan.copy_tensor[i])); });
  waits_ = waits_ || waits_after_[point];
}

// The op around an inner one may use unseen what that has left: `zeros` is followed by two views of
// its result, and one of the gradient, in the backward op of an embedding.
bool PlanSchedule::left_by_inner(const CandidateView& view, Tensor tensor, RangeId id) const {
  return view.ledger.at(id).fresh && cursor_.used_lately(tensor, kInnerOps);
}

void PlanSchedule::write_backs(const CandidateView& view, bool inner, std::vector<RangeId>& begin,
                               std::vector<RangeId>& end) {
  const auto unit_of = [&](Tensor tensor) {
    const RangeId id = cursor_.unit_of(tensor);
    return id != kNoRange && view.live(id) ? id : kNoRange;
  };
  for (Tensor tensor : std::exchange(end_write_back_, {})) {
    std::erase_if(write_back_, [&](const Copy& copy) { return copy.tensor == tensor; });
    if (const RangeId id = unit_of(tensor); id != kNoRange) end.push_back(id);
  }
  std::erase_if(write_back_, [&](const Copy& copy) {
    if (cursor_.life(copy.tensor) != copy.life) return true;
    const RangeId id = unit_of(copy.tensor);
    if (id == kNoRange) return true;
    const residency::Unit& unit = view.ledger.at(id);
    if (unit.in_collective || unit.op_pins > 0) return false;  // may still be written
    if (inner && left_by_inner(view, copy.tensor, id)) return false;
    begin.push_back(id);
    return true;
  });
}

void PlanSchedule::evictions(const CandidateView& view, bool inner, std::vector<RangeId>& out) {
  evict_.drop_if([&](Tensor tensor) {
    if (!marked(evict_mark_, tensor)) return true;
    const RangeId id = cursor_.unit_of(tensor);
    const bool here = id != kNoRange && !view.away(id);
    if (here && !view.evictable(id) && !view.kept_in_place(id)) return false;  // in use
    if (here && inner && left_by_inner(view, tensor, id)) return false;
    evict_mark_[index(tensor)] = 0;
    if (id != kNoRange && view.evictable(id)) out.push_back(id);
    return true;
  });
}

const PlanSchedule::Fetch* PlanSchedule::head() const {
  if (gated()) return fetch_.empty() ? nullptr : &fetch_.top();
  return in_turn_.empty() ? nullptr : &in_turn_.front();
}

void PlanSchedule::request_fetch(const Fetch& fetch) {
  mark(fetch_mark_, fetch.tensor);
  if (gated())
    fetch_.push(fetch);
  else
    in_turn_.push_back(fetch);
}

bool PlanSchedule::returns_later(Tensor tensor) const {
  const std::int64_t next = cursor_.next_use(tensor);
  if (!gated() || next == kNever) return false;
  const std::int64_t use = next % cursor_.plan().n_ops;
  return returned_[index(tensor)] != use &&
         std::binary_search(returns_.begin(), returns_.end(), std::pair(tensor, use));
}

void PlanSchedule::evicted(RangeId id) {
  const Tensor tensor = cursor_.tensor_of(id);
  if (!gated() || tensor == kNoTensor || marked(fetch_mark_, tensor) || returns_later(tensor))
    return;
  const std::int64_t by = cursor_.next_use(tensor);
  if (by != kNever) request_fetch({tensor, cursor_.life(tensor), by, ++turn_, false});
}

void PlanSchedule::drop_head() {
  UMEM_ASSERT(head() != nullptr, "there is a fetch to drop");
  fetch_mark_[index(head()->tensor)] = 0;
  if (gated())
    fetch_.pop();
  else
    in_turn_.pop_front();
}

// The plan keeps room for it until its use, beside what is here and not in the plan. Else the next
// block would evict what was fetched last.
bool PlanSchedule::admits(const CandidateView& view, const Fetch& fetch) const {
  if (!gated() || !fetch.planned) return true;
  const Plan& plan = cursor_.plan();
  const auto by = static_cast<std::size_t>(fetch.by);
  const std::int64_t max = cursor_.next_op() < by ? occupancy_.max(cursor_.next_op(), by) : 0;
  return max + unplanned_bytes(view) + plan.bytes[index(fetch.tensor)] <= plan.capacity;
}

// A tensor that lives between two ops lives in both. Plans fill their capacity, and only those for
// mapped memory leave some of the budget free, so that others would wait for the least excess.
std::int64_t PlanSchedule::unplanned_bytes(const CandidateView& view) const {
  if (!view.mapped) return 0;
  const std::size_t next = cursor_.next_op();
  std::int64_t planned = occupancy_.at(next);
  if (next > 0) planned = std::min(planned, occupancy_.at(next - 1) + started_bytes_);
  const auto available = static_cast<std::int64_t>(view.available_bytes);
  return std::max<std::int64_t>(cursor_.plan().capacity - planned - available, 0);
}

void PlanSchedule::started(const Fetch& fetch) {
  const auto n = static_cast<std::int64_t>(cursor_.n_ops());
  UMEM_ASSERT(!fetch.planned || fetch.by < 2 * n, "a fetch is for this step or for the next");
  if (gated() && fetch.planned)
    occupancy_.add(cursor_.next_op(), static_cast<std::size_t>(fetch.by),
                   cursor_.plan().bytes[index(fetch.tensor)]);
  if (fetch.planned) started_bytes_ += cursor_.plan().bytes[index(fetch.tensor)];
  if (fetch.planned && fetch.by >= n) ahead_.push_back(fetch);
  back(fetch);
}

// It is there, or on its way, and stays until its use.
void PlanSchedule::back(const Fetch& fetch) {
  returned_[index(fetch.tensor)] = fetch.by % static_cast<std::int64_t>(cursor_.n_ops());
}

RangeId PlanSchedule::next_fetch(const CandidateView& view) {
  while (const Fetch* next = head()) {
    const RangeId id = cursor_.unit_of(next->tensor);
    const bool late = next->by < static_cast<std::int64_t>(cursor_.next_op());
    if (!late && !stale(*next)) {
      if (marked(evict_mark_, next->tensor)) return kNoRange;
      if (view.away(id)) {
        const std::size_t bytes = view.ledger.at(id).bytes;
        if (bytes > view.available_bytes || !admits(view, *next)) return kNoRange;
        // A unit that left for the plan's headroom would fill it again at once.
        const auto headroom = static_cast<std::size_t>(cursor_.plan().headroom);
        if (!next->planned && bytes + headroom > view.available_bytes) {
          drop_head();
          continue;
        }
        started(*next);
        drop_head();
        return id;
      }
      back(*next);
    }
    drop_head();
  }
  return kNoRange;
}

}  // namespace umem::policy
