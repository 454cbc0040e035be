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

struct View {
  const Ledger& ledger;
  std::size_t min_swap_bytes;
  std::size_t room_bytes = 0;  // could be brought in now without evicting anything that lives

  // May leave now: resident, live, not in use by a running op, and the program does not keep it.
  bool evictable(RangeId id) const {
    const Unit& unit = ledger.at(id);
    return unit.state == State::kDevice && unit.pins == 0 && !ledger.stays(id);
  }
  // The program wants it left where it is.
  bool stays(RangeId id) const { return ledger.stays(id); }
  bool away(RangeId id) const { return ledger.away(id); }
  bool live(RangeId id) const { return ledger.live(id); }
  bool worth_moving(const Unit& unit) const {
    return !unit.segment && unit.bytes >= min_swap_bytes;
  }
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
  virtual void victims(const View& view, std::size_t need, std::vector<RangeId>& out) const = 0;

  // True: it is told of all below, and asked for what it wants.
  virtual bool follows() const { return false; }
  // A unit came to life, or died.
  virtual void admitted(const View&, RangeId) {}
  virtual void retired(RangeId) {}
  // A unit was sent out because room was short, and not by a wish.
  virtual void evicted(RangeId) {}
  // An op ended that used these units (with repetitions; some may have died in it); a step ended.
  virtual Followed op_ended(const View&, const RangeId*, std::size_t) { return Followed::kNone; }
  virtual void step_ended(const View&) {}

  // After an op or a step: whether it wants any of these. Appends what is to leave now. What is in
  // use then has to be asked again.
  virtual bool wishes() const { return false; }
  virtual void evictions(const View&, std::vector<RangeId>&) {}
  // Bytes to be kept free beyond what is needed.
  virtual std::size_t headroom() const { return 0; }
  // The next unit to bring in, which is away and fits into the view's room; kNoRange: none now.
  virtual RangeId next_fetch(const View&) { return kNoRange; }
  // Appends the units that nothing writes from here on, so that their copies on the host stay
  // valid; false: they are the same as at the last call.
  virtual bool take_read_mostly(std::vector<RangeId>&) { return false; }
  // Appends what is to be copied to the host now and stay, since nothing writes it until it leaves;
  // and whose copies end, since it will be written. Said once.
  virtual void copies(const View&, std::vector<RangeId>& /*begin*/, std::vector<RangeId>& /*end*/) {
  }
  // Compute waits for all moves; said once.
  virtual bool take_wait() { return false; }
};

}  // namespace umem::residency
