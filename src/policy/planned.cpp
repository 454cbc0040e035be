#include "policy/planned.h"

#include <algorithm>
#include <array>
#include <queue>
#include <tuple>
#include <utility>

#include "policy/victims.h"

namespace umem::policy {
namespace {

// Eviction classes, the first to be evicted first.
enum class Class : int { kIdle, kReturning, kPlain, kUnknown, kSoon, kKept, kSmall, kCount };

}  // namespace

std::uint64_t Planned::install(Plan plan, const std::vector<RangeId>& units) {
  if (entries_.size() == kMaxPlans)
    entries_.erase(std::min_element(entries_.begin(), entries_.end(),
                                    [](auto& a, auto& b) { return a->used < b->used; }));
  entries_.push_back(std::make_unique<Entry>(std::move(plan), units));
  active_ = entries_.back().get();
  active_->number = ++numbers_;
  active_->used = ++clock_;
  believe(active_);
  return active_->number;
}

void Planned::clear() {
  entries_.clear();
  from_helpers_.clear();  // without plans their deaths are not reported
  active_ = nullptr;
  complete_ = 0;
  hits_ = misses_ = last_hits_ = last_misses_ = 0;  // without plans ends of steps are not reported
  read_mostly_.clear();
}

std::size_t Planned::place_of(std::uint64_t number) const {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](auto& entry) { return entry->number == number; });
  return static_cast<std::size_t>(found - entries_.begin());
}

const Plan* Planned::plan(std::uint64_t number) const {
  const std::size_t place = place_of(number);
  return place < entries_.size() ? &entries_[place]->cursor.plan() : nullptr;
}

bool Planned::roll_back(std::uint64_t number) {
  const Plan* old = plan(number);
  return old && replace(number, without_moves(*old));
}

bool Planned::replace(std::uint64_t number, Plan plan) {
  const std::size_t place = place_of(number);
  if (place == entries_.size()) return false;
  const Entry& old = *entries_[place];
  auto made = std::make_unique<Entry>(std::move(plan), old.cursor.units());
  made->number = old.number;
  made->used = old.used;
  const bool acted = active_ == &old;
  if (write_back_plan_ == &old) write_back_plan_ = nullptr;  // its copies end like another plan's
  entries_[place] = std::move(made);
  if (!acted) return true;
  active_ = entries_[place].get();
  believe(active_);
  return true;
}

PlanStatus Planned::status() const {
  std::vector<std::uint64_t> plans;
  for (const std::unique_ptr<Entry>& entry : entries_) plans.push_back(entry->number);
  return {std::move(plans), active_ ? active_->number : 0, complete_, last_hits_, last_misses_};
}

// Among the plans that still fit, chooses the best fit, and then the most recently matched.
void Planned::choose() {
  active_ = nullptr;
  for (const std::unique_ptr<Entry>& entry : entries_) {
    if (entry->cursor.lost()) continue;
    const auto rank = [](const Entry& one) {
      return std::tuple(one.cursor.detours(), one.cursor.resized(), one.cursor.misplaced(),
                        one.cursor.strays(), one.last != Followed::kHit, ~one.used);
    };
    if (!active_ || rank(*entry) < rank(*active_)) active_ = entry.get();
  }
}

// Called in the middle of a step.
void Planned::diverged() {
  const Entry* before = active_;
  choose();
  if (active_ && active_ != before) believe(active_);
}

// Without a plan, what earlier ones did not write is still not written.
void Planned::believe(const Entry* entry) {
  if (!entry) return;
  std::vector<RangeId> units;
  for (std::int64_t tensor : entry->cursor.plan().read_mostly) {
    const RangeId id = entry->cursor.unit_of(static_cast<Tensor>(tensor));
    const bool written = std::find(written_.begin(), written_.end(), id) != written_.end();
    if (id != kNoRange && !written) units.push_back(id);
  }
  if (units == read_mostly_) return;
  read_mostly_ = std::move(units);
  read_mostly_changed_ = true;
}

// Later steps may not write it again, as after weights were merged.
void Planned::written(RangeId id) {
  std::erase(read_mostly_, id);
  written_.push_back(id);
}

bool Planned::take_read_mostly(std::vector<RangeId>& out) {
  if (!std::exchange(read_mostly_changed_, false)) return false;
  out.insert(out.end(), read_mostly_.begin(), read_mostly_.end());
  return true;
}

void Planned::admitted(const CandidateView& view, RangeId id) {
  const residency::Unit& unit = view.ledger.at(id);
  for (const std::unique_ptr<Entry>& entry : entries_)
    if (unit.segment)
      entry->cursor.segment_admitted(id);
    else
      entry->cursor.admitted(id, unit.bytes);
  if (active_ && active_->cursor.lost()) diverged();
}

void Planned::admitted_by_helper(const CandidateView& view, RangeId id) {
  if (view.ledger.at(id).segment)
    admitted(view, id);  // identified by its address
  else
    from_helpers_.push_back(id);
}

// The op without helper threads' allocations at addresses that the op's own allocations had and
// freed. A helper's allocation that the op is given as an input belongs to the program from now on.
OpUse Planned::without_helpers(const CandidateView& view, const OpUse& op) {
  if (from_helpers_.empty()) return op;
  for (std::size_t i = 0; i < op.inputs; ++i)
    if (std::erase(from_helpers_, op.ids[i]) > 0 && view.live(op.ids[i])) admitted(view, op.ids[i]);
  own_.assign(op.ids, op.ids + op.count);
  std::erase_if(own_, [&](RangeId id) {
    return std::find(from_helpers_.begin(), from_helpers_.end(), id) != from_helpers_.end();
  });
  return {own_.data(), own_.size(), op.inputs, op.name, op.inner};
}

void Planned::retired(RangeId id) {
  std::erase(from_helpers_, id);
  for (const std::unique_ptr<Entry>& entry : entries_) entry->cursor.retired(id);
  const auto found = std::find(read_mostly_.begin(), read_mostly_.end(), id);
  if (found != read_mostly_.end()) read_mostly_.erase(found);  // the range may serve again
  const auto found_copy = std::lower_bound(written_back_.begin(), written_back_.end(), id);
  if (found_copy != written_back_.end() && *found_copy == id) written_back_.erase(found_copy);
}

void Planned::forgotten(RangeId id) {
  for (const std::unique_ptr<Entry>& entry : entries_) entry->cursor.forgotten(id);
}

void Planned::evicted(RangeId id) {
  if (active_) active_->schedule.evicted(id);
}

Followed Planned::op_ended(const CandidateView& view, const OpUse& op) {
  const OpUse own = without_helpers(view, op);
  inner_ = op.inner;
  const bool small = std::any_of(entries_.begin(), entries_.end(),
                                 [](auto& entry) { return entry->cursor.has_segments(); });
  const bool counts = std::any_of(own.ids, own.ids + own.count, [&](RangeId id) {
    return view.live(id) && (small || !view.ledger.at(id).segment);
  });
  bool any = counts && !active_, hit = false;
  const auto follow = [&](Entry& entry, bool search) {
    entry.last = entry.cursor.op_ended(view, own, search);
    if (entry.last == Followed::kHit) entry.schedule.op_ended();
    any |= entry.last != Followed::kNone;
    hit |= entry.last == Followed::kHit;
  };
  const std::size_t detours = active_ ? active_->cursor.detours() : 0;
  const std::size_t misplaced = active_ ? active_->cursor.misplaced() : 0;
  if (active_) follow(*active_, true);
  // Lost plans search for the program's place only if it may help.
  const bool followed = active_ && !active_->cursor.lost() && active_->cursor.strays() == 0 &&
                        active_->cursor.detours() == detours;
  for (const std::unique_ptr<Entry>& entry : entries_)
    if (entry.get() != active_) follow(*entry, !followed);
  if (!any) return Followed::kNone;
  if (!followed || active_->cursor.misplaced() > misplaced ||
      (hit && active_->last != Followed::kHit))
    diverged();
  const Followed result = active_ ? active_->last : Followed::kMiss;
  hits_ += result == Followed::kHit ? 1 : 0;
  misses_ += result == Followed::kMiss ? 1 : 0;
  return result;
}

void Planned::step_ended(const CandidateView& view) {
  last_begin_ = std::exchange(begin_, view.ledger.now());
  Entry* complete = nullptr;
  inner_ = false;
  for (const std::unique_ptr<Entry>& entry : entries_) {
    const bool whole = entry->cursor.step_ended();
    entry->last = Followed::kNone;
    if (entry.get() != active_) entry->schedule.drop_write_backs();
    entry->schedule.step_began(whole);
    const bool better = !complete || entry.get() == active_ ||
                        (complete != active_ && entry->used > complete->used);
    if (whole && better) complete = entry.get();
  }
  if (complete) complete->used = ++clock_;
  complete_ = complete ? complete->number : 0;
  written_.clear();
  believe(complete);
  choose();
  last_hits_ = std::exchange(hits_, 0);
  last_misses_ = std::exchange(misses_, 0);
}

bool Planned::has_pending() const {
  return read_mostly_changed_ || (write_back_plan_ != active_ && !written_back_.empty()) ||
         (active_ && (!active_->schedule.empty() || active_->schedule.waits() || headroom() > 0));
}

void Planned::evictions(const CandidateView& view, std::vector<RangeId>& out) {
  if (active_) active_->schedule.evictions(view, inner_, out);
}

std::size_t Planned::headroom() const {
  return active_ ? static_cast<std::size_t>(active_->cursor.plan().headroom) : 0;
}

bool Planned::moves() const {
  return active_ && !active_->cursor.plan().evict_after.empty();
}

bool Planned::gated() const {
  return active_ && active_->cursor.plan().gated != 0;
}

// Copies made for a plan that no longer acts may be written now.
void Planned::write_backs(const CandidateView& view, std::vector<RangeId>& begin,
                          std::vector<RangeId>& end) {
  if (write_back_plan_ != active_) end = std::exchange(written_back_, {});
  write_back_plan_ = active_;
  if (!active_) return;
  const std::size_t others = end.size();
  active_->schedule.write_backs(view, inner_, begin, end);
  for (RangeId id : begin) {
    const auto place = std::lower_bound(written_back_.begin(), written_back_.end(), id);
    if (place == written_back_.end() || *place != id) written_back_.insert(place, id);
  }
  for (std::size_t i = others; i < end.size(); ++i) {
    const auto place = std::lower_bound(written_back_.begin(), written_back_.end(), end[i]);
    if (place != written_back_.end() && *place == end[i]) written_back_.erase(place);
  }
}

RangeId Planned::next_fetch(const CandidateView& view) {
  return active_ ? active_->schedule.next_fetch(view) : kNoRange;
}

bool Planned::take_wait() {
  return active_ && active_->schedule.take_wait();
}

// Without moves, a plan is lru. Else first units that it does not know and that nothing used in the
// last step, such as those of an optimizer that waits for Python's collector; then its cold units;
// then those that it has away by now, or soon, until it fetches them; then the others in the plan's
// order: those that it knows before those that it does not, then units that the next ops use, units
// that it keeps, and last those too small to be worth a move.
void Planned::victims(const CandidateView& view, std::size_t need,
                      std::vector<RangeId>& out) const {
  if (!active_ || leaves_victims_to_lru(active_->cursor.plan()))
    return lru_victims(view, need, out);
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
    const bool idle = unit.last_use < last_begin_ && !unit.prefetched_unused;
    if (tensor == kNoTensor && idle) return Class::kIdle;
    if (tensor == kNoTensor) return order == Order::kFurthest ? Class::kUnknown : Class::kPlain;
    if (active_->keep[static_cast<std::size_t>(tensor)]) return Class::kKept;
    if (schedule.returns_later(tensor) && !cursor.used_lately(tensor)) return Class::kReturning;
    const std::int64_t next = cursor.next_use(tensor);
    // The op that just ended may be nested in another op, which uses the inner op's results until
    // it frees them: operators on mixed types convert their inputs so.
    if (next == kNever && cursor.used_lately(tensor)) return Class::kSoon;
    const auto soon = static_cast<std::int64_t>(cursor.next_op()) + plan.window;
    return next < soon ? Class::kSoon : Class::kPlain;
  };
  // The smallest rank is evicted first. By last use they are already in order.
  const auto rank = [&](RangeId id) -> std::int64_t {
    const Tensor tensor = cursor.tensor_of(id);
    const auto first = static_cast<std::int64_t>(view.ledger.at(id).first_use);
    if (order == Order::kFifo) return first == 0 ? kNever : first;
    return tensor == kNoTensor ? 0 : -cursor.next_use(tensor);
  };

  std::array<std::vector<RangeId>, static_cast<std::size_t>(Class::kCount)> classes;
  for (RangeId id = view.ledger.oldest_resident(); id != kNoRange; id = view.ledger.at(id).newer)
    if (view.evictable(id) && !is_cold(id))
      classes[static_cast<std::size_t>(class_of(id))].push_back(id);
  for (std::size_t c = 0; c < classes.size(); ++c) {
    const std::vector<RangeId>& ids = classes[c];
    if (static_cast<Class>(c) == Class::kReturning)
      for (Tensor tensor : schedule.cold()) {
        const RangeId id = cursor.unit_of(tensor);
        if (need == 0) return;
        if (id != kNoRange && schedule.cold(tensor) && view.evictable(id) &&
            std::find(out.begin(), out.end(), id) == out.end())
          take(id);
      }
    std::vector<std::pair<std::int64_t, std::size_t>> found;  // rank, and place in `ids`
    for (std::size_t i = 0; i < ids.size() && need > 0; ++i)
      if (order == Order::kLru)
        take(ids[i]);
      else
        found.emplace_back(rank(ids[i]), i);
    std::priority_queue first(std::greater<>(), std::move(found));
    for (; !first.empty() && need > 0; first.pop()) take(ids[first.top().second]);
  }
}

}  // namespace umem::policy
