// The plan bounds its due requests, however many steps follow it.
#include <cstdint>
#include <vector>

#include "expect.h"
#include "policy/plan_cursor.h"
#include "policy/plan_schedule.h"
#include "residency/ledger.h"

namespace {

using namespace umem;  // NOLINT: a test program

constexpr std::int64_t kBytes = 2 * MiB;
constexpr residency::RangeId kA = 1, kB = 2;

// Two weights; each op uses one.
policy::Plan plan_of(const std::vector<std::int64_t>& used) {
  policy::Plan plan;
  plan.n_ops = static_cast<std::int64_t>(used.size());
  plan.bytes = {kBytes, kBytes};
  plan.kind = {0, 0};
  plan.next_alias = {-1, -1};
  plan.address = plan.segment = {0, 0};
  for (std::int64_t op = 0; op <= plan.n_ops; ++op) plan.access_start.push_back(op);
  plan.access_tensor = used;
  plan.op.assign(used.size(), 0);
  return plan;
}

residency::Ledger both_here() {
  residency::Ledger ledger;
  for (residency::RangeId id : {kA, kB}) {
    ledger.add(id, kBytes, false, residency::Tag::kParam, residency::Family::kNone);
    ledger.set_state(id, residency::State::kDevice);
    ledger.touch(id);
  }
  return ledger;
}

// They are used in turn; after each op the other one is cold, and leaves.
policy::Plan plan() {
  policy::Plan plan = plan_of({0, 1});
  plan.evict_after = plan.cold_after = {0, 1};
  plan.evict_tensor = plan.cold_tensor = {1, 0};
  EXPECT(policy::check(plan).ok());
  return plan;
}

void run(bool acts) {
  residency::Ledger ledger = both_here();
  const residency::CandidateView view{ledger, 0};
  policy::PlanCursor cursor(plan(), {kA, kB});
  policy::PlanSchedule schedule(cursor);
  for (int step = 0; step < 100; ++step) {
    for (residency::RangeId id : {kA, kB}) {
      EXPECT(cursor.op_ended(view, {&id, 1, 1}) == policy::Followed::kHit);
      schedule.op_ended();
      std::vector<residency::RangeId> leaving;
      if (acts) schedule.evictions(view, false, leaving);
      EXPECT(leaving.size() == (acts ? 1u : 0u));
    }
    EXPECT(cursor.step_ended());
    schedule.step_began(true);
    EXPECT(schedule.cold().size() <= 2);
    EXPECT(schedule.due_evictions() <= 2);
  }
  // It leaves now, at any place in the queue.
  std::vector<residency::RangeId> leaving;
  schedule.evictions(view, false, leaving);
  EXPECT(leaving == (acts ? std::vector<residency::RangeId>{} : std::vector{kA}));
}

// Op 0 writes a weight, op 1 reads it and op 2 another one: between two writes it has a copy.
policy::Plan with_copies() {
  policy::Plan plan = plan_of({0, 0, 1});
  plan.copy_after = {0};
  plan.copy_until = {3};
  plan.copy_tensor = {0};
  EXPECT(policy::check(plan).ok());
  return plan;
}

// A copy that was made while a collective writes would be dropped by the next write.
void copies_wait_for_collectives(bool ends_in_time) {
  residency::Ledger ledger = both_here();
  const residency::CandidateView view{ledger, 0};
  policy::PlanCursor cursor(with_copies(), {kA, kB});
  policy::PlanSchedule schedule(cursor);
  using Units = std::vector<residency::RangeId>;
  const auto expect = [&](const Units& begin, const Units& end) {
    Units begins, ends;
    schedule.write_backs(view, false, begins, ends);
    EXPECT(begins == begin && ends == end);
  };
  const auto op = [&](residency::RangeId id) {
    ledger.pin(id);
    expect({}, {});  // the op has begun
    ledger.unpin(id);
    EXPECT(cursor.op_ended(view, {&id, 1, 1}) == policy::Followed::kHit);
    schedule.op_ended();
  };
  expect({}, {kA});  // op 0 will write it
  op(kA);
  ledger.begin_collective(kA, kBytes);
  expect({}, {});
  EXPECT(!schedule.empty());
  if (ends_in_time) {
    ledger.end_collective(kA);  // op 1 uses it
    op(kA);
    expect({kA}, {});
  } else {
    op(kA);
    expect({}, {});
  }
  EXPECT(schedule.empty() == ends_in_time);
  op(kB);
  EXPECT(cursor.step_ended());
  schedule.step_began(true);
  expect({}, {kA});
  EXPECT(schedule.empty());
  ledger.end_collective(kA);
  expect({}, {});  // it is late for a copy
}

// A plan may follow many steps before it acts, and its copies are due in none of them.
void copies_that_nobody_takes_are_forgotten(bool dropped) {
  residency::Ledger ledger = both_here();
  const residency::CandidateView view{ledger, 0};
  policy::PlanCursor cursor(with_copies(), {kA, kB});
  policy::PlanSchedule schedule(cursor);
  for (int step = 0; step < 100; ++step) {
    for (residency::RangeId id : {kA, kA, kB}) {
      EXPECT(cursor.op_ended(view, {&id, 1, 1}) == policy::Followed::kHit);
      schedule.op_ended();
    }
    EXPECT(cursor.step_ended());
    if (dropped) schedule.drop_write_backs();
    schedule.step_began(true);
  }
  std::vector<residency::RangeId> begins, ends;
  schedule.write_backs(view, false, begins, ends);
  EXPECT(begins.empty());  // op 0 will write it
  EXPECT(ends.size() == (dropped ? 1u : 101u));
}

// A plan of 4 MiB: after op 0 its weight leaves, and returns for op 2 beside the other one.
policy::Plan that_fetches() {
  policy::Plan plan = plan_of({0, 1, 0});
  plan.evict_after = {0};
  plan.evict_tensor = {0};
  plan.fetch_after = {0};
  plan.fetch_by = {2};
  plan.fetch_tensor = {0};
  plan.gated = 1;
  plan.capacity = 2 * kBytes;
  plan.occupancy = {2 * kBytes, kBytes, 2 * kBytes};
  EXPECT(policy::check(plan).ok());
  return plan;
}

// A fetch that the plan has room for waits while `unplanned` bytes are beside it: else the next
// block would evict it.
void fetches_count_what_is_not_planned(std::int64_t unplanned) {
  residency::Ledger ledger = both_here();
  const auto view = [&](std::int64_t used) {
    return residency::CandidateView{ledger, 0, static_cast<std::size_t>(3 * kBytes - used), true};
  };
  policy::PlanCursor cursor(that_fetches(), {kA, kB});
  policy::PlanSchedule schedule(cursor);
  EXPECT(cursor.op_ended(view(2 * kBytes), {&kA, 1, 1}) == policy::Followed::kHit);
  schedule.op_ended();
  std::vector<residency::RangeId> leaving;
  schedule.evictions(view(2 * kBytes), false, leaving);
  EXPECT(leaving == std::vector{kA});
  ledger.set_state(kA, residency::State::kHost);
  const residency::RangeId next = schedule.next_fetch(view(kBytes + unplanned));
  // The budget is one unit above the plan's capacity: so much goes unnoticed.
  EXPECT(next == (unplanned > kBytes ? residency::kNoRange : kA));
  EXPECT(schedule.next_fetch(view(kBytes)) == (unplanned > kBytes ? kA : residency::kNoRange));
}

}  // namespace

int main() {
  run(true);
  run(false);  // a plan next to the active one
  copies_wait_for_collectives(true);
  copies_wait_for_collectives(false);
  copies_that_nobody_takes_are_forgotten(true);
  copies_that_nobody_takes_are_forgotten(false);
  fetches_count_what_is_not_planned(0);
  fetches_count_what_is_not_planned(kBytes);
  fetches_count_what_is_not_planned(kBytes + 1);
  return g_wrong != 0;
}
