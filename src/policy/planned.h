// The policy that executes plans. It keeps several, and follows each as long as the program does
// what it says; one of those that still fit acts. When none does, units leave as in `lru` from this
// op on, until the next step begins.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "policy/agenda.h"
#include "policy/follower.h"
#include "policy/plan.h"
#include "residency/policy.h"

namespace umem::policy {

struct PlanStatus {
  std::size_t plans = 0;
  // Numbers that `install` gave; 0: none. The one that acts, the one that the last step went by.
  std::uint64_t active = 0, complete = 0;
  std::uint64_t hits = 0, misses = 0;  // ops of the last step
};

class Planned final : public residency::Policy {
 public:
  static constexpr std::size_t kMostPlans = 8;

  Planned();
  // A step begins here. `units` as in Follower. Returns the plan's number, from 1. Of too many
  // plans the one goes whose last complete step is the longest ago.
  std::uint64_t install(Plan plan, const std::vector<RangeId>& units);
  void clear();
  // A step begins here. Steps that go by the plan still do, and units leave in them as in `lru`:
  // what is known of a step outlives a plan that was no good. False: there is no such plan.
  bool retract(std::uint64_t number);
  PlanStatus status() const;

  const char* name() const override { return "planned"; }
  void victims(const View& view, std::size_t need, std::vector<RangeId>& out) const override;
  bool follows() const override { return !entries_.empty(); }
  void admitted(const View& view, RangeId id) override;
  void retired(RangeId id) override;
  void evicted(RangeId id) override;
  Followed op_ended(const View& view, const RangeId* ids, std::size_t count) override;
  void step_ended(const View& view) override;
  bool wishes() const override;
  void evictions(const View& view, std::vector<RangeId>& out) override;
  std::size_t headroom() const override;
  RangeId next_fetch(const View& view) override;
  bool take_wait() override;
  bool take_read_mostly(std::vector<RangeId>& out) override;
  void copies(const View& view, std::vector<RangeId>& begin, std::vector<RangeId>& end) override;

 private:
  struct Entry {
    Entry(Plan plan, const std::vector<RangeId>& units)
        : follower(std::move(plan), units), agenda(follower), keep(follower.plan().bytes.size()) {
      for (std::int64_t tensor : follower.plan().keep)
        keep[static_cast<std::size_t>(tensor)] = true;
    }
    Follower follower;
    Agenda agenda;
    std::vector<bool> keep;
    std::uint64_t number = 0;
    std::uint64_t used = 0;  // when the last step that was as it says ended, or it came
    Followed last = Followed::kNone;
  };

  void choose();
  void diverged();
  void believe(const Entry* entry);

  std::vector<std::unique_ptr<Entry>> entries_;
  Entry* active_ = nullptr;
  std::unique_ptr<residency::Policy> lru_;
  // What nothing writes by the plan that is believed in: of the last step, or that acts now.
  std::vector<RangeId> read_mostly_;
  bool read_mostly_changed_ = false;
  // What is copied for a while, sorted, and by whose plan.
  std::vector<RangeId> copied_;
  const Entry* copier_ = nullptr;
  std::uint64_t numbers_ = 0, clock_ = 0, complete_ = 0;
  std::uint64_t hits_ = 0, misses_ = 0, last_hits_ = 0, last_misses_ = 0;
};

}  // namespace umem::policy
