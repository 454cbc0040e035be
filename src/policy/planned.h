// The part of the policy `planned` that executes plans. It keeps several plans, and follows each
// while the program matches it; one that still fits acts. When none fits, units are evicted as in
// `lru` until the next step begins.
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
  std::vector<std::uint64_t> plans;  // their numbers from `install`
  // The plan that acts, and the one that the last step followed; 0: none.
  std::uint64_t active = 0, complete = 0;
  std::uint64_t hits = 0, misses = 0;  // ops of the last step
};

class Planned {
 public:
  static constexpr std::size_t kMaxPlans = 8;

  // Call these where a step begins. `units` as in PlanCursor. Returns the plan's number, from 1. If
  // there are too many plans, the one whose last complete step is the oldest is dropped.
  std::uint64_t install(Plan plan, const std::vector<RangeId>& units);
  void clear();
  // Removes the plan's moves. Steps still match it, and units are evicted as in `lru`: knowledge of
  // a step outlives a bad plan. False: there is no such plan.
  bool roll_back(std::uint64_t number);
  // Replaces the plan's moves by those of a plan for the same steps. False: there is no such plan.
  bool replace(std::uint64_t number, Plan plan);
  const Plan* plan(std::uint64_t number) const;  // null: there is none
  PlanStatus status() const;

  bool has_plans() const { return !entries_.empty(); }
  // Appends units to evict, first to go first, until they hold `need` bytes or none is left.
  void victims(const CandidateView& view, std::size_t need, std::vector<RangeId>& out) const;

  // Events, in program order. A unit was allocated, or freed.
  void admitted(const CandidateView& view, RangeId id);
  // A unit was allocated by a thread on which no steps run: it counts from the first op that uses
  // it.
  void admitted_by_helper(const CandidateView& view, RangeId id);
  void retired(RangeId id);
  // The range of a unit that is not live goes back to the driver.
  void forgotten(RangeId id);
  // An op writes a unit of those that no op was to write.
  void written(RangeId id);
  // A unit is away because room was short or it slept, and not because the plan asked for it.
  void evicted(RangeId id);
  // An op ended; a step ended.
  Followed op_ended(const CandidateView& view, const OpUse& op);
  void step_ended(const CandidateView& view);

  // After an op or a step: true if there are any of these requests. `evictions` appends the units
  // to evict now, and repeats requests for units that are in use.
  bool has_pending() const;
  void evictions(const CandidateView& view, std::vector<RangeId>& out);
  // Bytes to be kept free beyond what is needed.
  std::size_t headroom() const;
  // True if the acting plan evicts.
  bool moves() const;
  // True if the acting plan says for each op what is on the device: room that is made beyond what
  // is needed would be filled again at once.
  bool gated() const;
  // The next unit to fetch, which is away and fits; kNoRange: none now.
  RangeId next_fetch(const CandidateView& view);
  // Appends units that the steps of the plan do not write, so that their copies on the host stay
  // valid until an op writes them; false: there is nothing new.
  bool take_read_mostly(std::vector<RangeId>& out);
  // Appends units to copy to the host now, which stay because nothing writes them before they are
  // evicted; and units whose copies end, because they will be written. Each is reported once.
  void write_backs(const CandidateView& view, std::vector<RangeId>& begin,
                   std::vector<RangeId>& end);
  // True once if compute is to wait for all moves.
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
    std::uint64_t used = 0;  // when the last step that matched it ended, or it was installed
    Followed last = Followed::kNone;
  };

  std::size_t place_of(std::uint64_t number) const;  // entries_.size(): there is none
  void choose();
  void diverged();
  void believe(const Entry* entry);

  OpUse without_helpers(const CandidateView& view, const OpUse& op);

  std::vector<std::unique_ptr<Entry>> entries_;
  Entry* active_ = nullptr;
  bool inner_ = false;                 // the op that ended last was within another
  std::vector<RangeId> from_helpers_;  // not yet used by an op of the program
  std::vector<RangeId> own_;           // result of `without_helpers`
  // Units that the current plan never writes: the last step's plan, or the acting one.
  std::vector<RangeId> read_mostly_;
  bool read_mostly_changed_ = false;  // since they were last taken
  std::vector<RangeId> written_;      // in this step, though they were said not to be
  // The units that are written back, sorted, and the plan that asked for it.
  std::vector<RangeId> written_back_;
  const Entry* write_back_plan_ = nullptr;
  std::uint64_t numbers_ = 0, clock_ = 0, complete_ = 0;
  std::uint64_t last_begin_ = 0, begin_ = 0;  // of the last step and of this one, in the ledger
  std::uint64_t hits_ = 0, misses_ = 0, last_hits_ = 0, last_misses_ = 0;
};

}  // namespace umem::policy
