// The part of the policy `planned` that executes plans. It keeps several, and follows each as long
// as the program does what it says; one of those that still fit acts. When none does, units leave
// as in `lru` from this op on, until the next step begins.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "policy/plan.h"
#include "policy/plan_cursor.h"
#include "policy/plan_schedule.h"
#include "residency/view.h"

namespace umem::policy {

struct PlanStatus {
  std::vector<std::uint64_t> plans;  // the numbers that `install` gave them
  // 0: none. The one that acts, the one that the last step went by.
  std::uint64_t active = 0, complete = 0;
  std::uint64_t hits = 0, misses = 0;  // ops of the last step
};

class Planned {
 public:
  static constexpr std::size_t kMaxPlans = 8;

  // A step begins here. `units` as in PlanCursor. Returns the plan's number, from 1. Of too many
  // plans the one goes whose last complete step is the longest ago.
  std::uint64_t install(Plan plan, const std::vector<RangeId>& units);
  void clear();
  // A step begins here. Steps that go by the plan still do, and units leave in them as in `lru`:
  // what is known of a step outlives a plan that was no good. False: there is no such plan.
  bool roll_back(std::uint64_t number);
  // A step begins here. From now on steps that go by the plan do what this one says, which is for
  // the same steps. False: there is no such plan.
  bool replace(std::uint64_t number, Plan plan);
  const Plan* plan(std::uint64_t number) const;  // null: there is none
  PlanStatus status() const;

  bool has_plans() const { return !entries_.empty(); }
  // Appends units to evict, first to go first, until they hold `need` bytes or none is left.
  void victims(const CandidateView& view, std::size_t need, std::vector<RangeId>& out) const;

  // What happens, in program order. A unit came to life, or died.
  void admitted(const CandidateView& view, RangeId id);
  // One that a thread made on which no steps run: it counts from the first op that uses it.
  void admitted_by_helper(const CandidateView& view, RangeId id);
  void retired(RangeId id);
  // The range of a unit that is not live goes back to the driver.
  void forgotten(RangeId id);
  // A unit was sent out because room was short, and not because the plan asked for it.
  void evicted(RangeId id);
  // An op ended; a step ended.
  Followed op_ended(const CandidateView& view, const OpUse& op);
  void step_ended(const CandidateView& view);

  // After an op or a step: whether there are any of these requests. `evictions` appends what is to
  // leave now, and repeats a request for what is in use then.
  bool has_pending() const;
  void evictions(const CandidateView& view, std::vector<RangeId>& out);
  // Bytes to be kept free beyond what is needed.
  std::size_t headroom() const;
  // The next unit to bring in, which is away and fits into the view's room; kNoRange: none now.
  RangeId next_fetch(const CandidateView& view);
  // Appends the units that nothing writes from here on, so that their copies on the host stay
  // valid; false: they are the same as at the last call.
  bool take_read_mostly(std::vector<RangeId>& out);
  // Appends what is to be copied to the host now and stay, since nothing writes it until it leaves;
  // and whose copies end, since it will be written. Said once.
  void write_backs(const CandidateView& view, std::vector<RangeId>& begin,
                   std::vector<RangeId>& end);
  // Compute waits for all moves; said once.
  bool take_wait();

 private:
  struct Entry {
    Entry(Plan plan, const std::vector<RangeId>& units)
        : cursor(std::move(plan), units), schedule(cursor), keep(cursor.plan().bytes.size()) {
      for (std::int64_t tensor : cursor.plan().keep) keep[static_cast<std::size_t>(tensor)] = true;
    }
    PlanCursor cursor;
    PlanSchedule schedule;
    std::vector<bool> keep;
    std::uint64_t number = 0;
    std::uint64_t used = 0;  // when the last step that was as it says ended, or it came
    Followed last = Followed::kNone;
  };

  std::size_t place_of(std::uint64_t number) const;  // entries_.size(): there is none
  void choose();
  void diverged();
  void believe(const Entry* entry);

  OpUse without_helpers(const CandidateView& view, const OpUse& op);

  std::vector<std::unique_ptr<Entry>> entries_;
  Entry* active_ = nullptr;
  std::vector<RangeId> from_helpers_;  // that no op of the program's own has used yet
  std::vector<RangeId> own_;           // what `without_helpers` found
  // What nothing writes by the plan that is believed in: of the last step, or that acts now.
  std::vector<RangeId> read_mostly_;
  bool read_mostly_changed_ = false;
  // The units that are written back, sorted, and the plan that asked for it.
  std::vector<RangeId> written_back_;
  const Entry* write_back_plan_ = nullptr;
  std::uint64_t numbers_ = 0, clock_ = 0, complete_ = 0;
  std::uint64_t hits_ = 0, misses_ = 0, last_hits_ = 0, last_misses_ = 0;
};

}  // namespace umem::policy
