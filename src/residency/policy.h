// A policy says which units should leave, and moves nothing. Most are pure functions of the ledger;
// one that follows a plan is also told what happens, in program order, and says what it wants done
// between ops.
#pragma once
#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "residency/ledger.h"

namespace umem::residency {

struct CandidateView {
  const Ledger& ledger;
  std::size_t min_swap_bytes;
  std::size_t available_bytes = 0;  // could be brought in now without evicting anything that lives

  // May leave now: resident, live, not in use by a running op or a collective, and the program does
  // not keep it.
  bool evictable(RangeId id) const {
    const Unit& unit = ledger.at(id);
    return unit.state == State::kDevice && unit.op_pins == 0 && !unit.in_collective &&
           !ledger.kept_in_place(id);
  }
  // The program wants it left where it is.
  bool kept_in_place(RangeId id) const { return ledger.kept_in_place(id); }
  bool away(RangeId id) const { return ledger.away(id); }
  bool live(RangeId id) const { return ledger.live(id); }
  bool worth_moving(const Unit& unit) const {
    return !unit.segment && unit.bytes >= min_swap_bytes;
  }
};

// What an op used on a device: first its inputs, then what was allocated in it. With repetitions;
// some may have died in it, and the unit be another thread's by now.
struct OpUse {
  const RangeId* ids;
  std::size_t count, inputs;
  std::int64_t name = 0;  // a number for the op's name
};

// How an op fits the plan.
enum class Followed : unsigned char { kNone, kHit, kMiss };  // kNone: no op that a plan counts

class Policy {
 public:
  virtual ~Policy() = default;
  virtual const char* name() const = 0;
  // False: the engine neither evicts nor prefetches, and the driver's faults do it all.
  virtual bool active() const { return true; }
  // Appends units to evict, first to go first, until they hold `need` bytes or none is left.
  virtual void victims(const CandidateView& view, std::size_t need,
                       std::vector<RangeId>& out) const = 0;

  // True: it follows plans, so that all below is called.
  virtual bool is_planned() const { return false; }
  // A unit came to life, or died.
  virtual void admitted(const CandidateView&, RangeId) {}
  // One that a thread made on which no steps run: it counts from the first op that uses it.
  virtual void admitted_by_helper(const CandidateView&, RangeId) {}
  virtual void retired(RangeId) {}
  // The range of a unit that is not live goes back to the driver.
  virtual void forgotten(RangeId) {}
  // A unit was sent out because room was short, and not because the policy asked for it.
  virtual void evicted(RangeId) {}
  // An op ended; a step ended.
  virtual Followed op_ended(const CandidateView&, const OpUse&) { return Followed::kNone; }
  virtual void step_ended(const CandidateView&) {}

  // After an op or a step: whether it has any of these requests. `evictions` appends what is to
  // leave now; the policy repeats a request for what is in use then.
  virtual bool has_pending() const { return false; }
  virtual void evictions(const CandidateView&, std::vector<RangeId>&) {}
  // Bytes to be kept free beyond what is needed.
  virtual std::size_t headroom() const { return 0; }
  // The next unit to bring in, which is away and fits into the view's room; kNoRange: none now.
  virtual RangeId next_fetch(const CandidateView&) { return kNoRange; }
  // Appends the units that nothing writes from here on, so that their copies on the host stay
  // valid; false: they are the same as at the last call.
  virtual bool take_read_mostly(std::vector<RangeId>&) { return false; }
  // Appends what is to be copied to the host now and stay, since nothing writes it until it leaves;
  // and whose copies end, since it will be written. Said once.
  virtual void write_backs(const CandidateView&, std::vector<RangeId>& /*begin*/,
                           std::vector<RangeId>& /*end*/) {}
  // Compute waits for all moves; said once.
  virtual bool take_wait() { return false; }
};

}  // namespace umem::residency
