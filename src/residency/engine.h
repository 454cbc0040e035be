// The engine: carries out what the policy says, within the budget. The act between the facts
// (ledger) and the choice (policy).
//
// A wrong decision here costs time only: bytes that are not where an op needs them fault in. The
// one exception is a discard, which is why only units without a live block are ever discarded, and
// only after all that their stream has been given.
//
// Not thread-safe: the runtime's lock is held around every call.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "backing/range_table.h"
#include "base/status.h"
#include "driver/place.h"
#include "residency/lane.h"
#include "residency/ledger.h"
#include "residency/policy.h"
#include "residency/shared_pages.h"
#include "residency/streams.h"

namespace umem::residency {

struct Limits {
  std::size_t budget_bytes = 0;
  std::size_t host_budget_bytes = 0;  // 0: unbounded
  std::size_t min_swap_bytes = 0;
  std::size_t outside_bytes = 0;  // of the budget, in use beside umem
  std::size_t reserve_bytes = 0;  // of the budget, never taken by holds: for what ops need at once
};

// What `sleep` is to give back of the device, until `wake` or until an op needs it.
struct SleepRequest {
  std::uint32_t tags = 0;  // bits by Tag
  bool discard = false;    // the bytes are lost, instead of kept on the host
  std::uint64_t number = 0;
};

struct Counters {
  std::uint64_t bytes_in = 0, bytes_out = 0, bytes_discarded = 0;
  std::uint64_t evictions = 0, prefetches = 0, prefetched_unused_bytes = 0;
  std::uint64_t capture_skips = 0;
  std::uint64_t plan_hits = 0, plan_misses = 0;
  std::uint64_t advice_ignored = 0;
};

class Engine {
 public:
  // `release_cached` gives the ranges without live blocks back to the driver (and `forget`s them):
  // the way to room where dead bytes cannot be discarded, or host memory of dead ranges is in the
  // way. Memory that is not `managed` never moves: the budget bounds what is handed out.
  Engine(const driver::Table& table, const backing::RangeTable& ranges, driver::Place place,
         bool managed, Limits limits, std::unique_ptr<Policy> policy,
         std::function<void()> release_cached);

  Status open();
  Status close();

  // The range got its first live block, on `stream`, in its first `bytes`. Makes room and populates
  // them on the device, piece by piece; what does not fit is left to faults. kOutOfHostMemory when
  // live bytes would exceed budget + host budget, or the block alone exceeds the budget and the
  // host has no room for it; kOutOfDeviceMemory when memory that cannot move does not fit. Nothing
  // changed then.
  Status admit(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family,
               cu::CUstream stream);
  // A further block of an admitted range was handed out: brings the range in if it is away.
  void prepare(RangeId id);
  // The range lost its last live block, and no stream but its own works on it: its bytes are dead.
  void retire(RangeId id);
  // The range goes back to the driver.
  void forget(RangeId id);
  // Blocks of the range take its pages in turn from here on: what a retired one had on the device
  // is there for the next. Before the range goes, with no block in it: close.
  void open_shared(std::uintptr_t base, std::size_t bytes);
  void close_shared();
  // An op is using some of the range.
  bool in_use(RangeId id) const;

  // Of units, each a whole range or a piece of a larger one. Before an op on `stream`: pins the
  // units and brings in those that are away.
  void begin_use(const RangeId* ids, std::size_t count, cu::CUstream stream);
  // After it: unpins them and marks them as used now.
  void end_use(const RangeId* ids, std::size_t count, cu::CUstream stream);
  // Once for each op, after all its `end_use`: the policy learns of it, and has its wishes done.
  void op_ended(const RangeId* ids, std::size_t count, cu::CUstream stream);
  // The program's step.
  void step_ended();
  // Bytes that have to be evicted for `bytes` more; 0 where nothing is ever evicted.
  std::size_t shortage(std::size_t bytes) const;
  // Who leaves first when room is made next, if it may: somebody outside was asked. Until the next
  // call.
  void prefer(std::vector<RangeId> ids) { preferred_ = std::move(ids); }
  // Has the policy's wishes done; `stream` is where compute may have to wait.
  void carry_out(cu::CUstream stream);

  // Hints. kBadState when an op is using the unit, or the program holds it.
  Status prefetch(RangeId id);
  Status evict(RangeId id);
  Status check_evictable(RangeId id) const;
  // kOutOfDeviceMemory where `more` held bytes would leave less than the reserve of `budget`.
  Status check_holds(std::size_t more, std::size_t budget) const;
  // The bytes of the unit in the span, whole pages, become indeterminate, as by work on `stream`.
  // How many did: 0 where memory does not move, or the driver cannot.
  Result<std::size_t> discard_live(RangeId id, backing::Span part, cu::CUstream stream);
  // On its way in, and out.
  bool arriving(RangeId id);
  bool leaving(RangeId id);
  // Advises the driver to keep a copy on both sides of what is read, so that eviction costs no
  // transfer; a write drops the host's copy, and the next eviction moves the bytes.
  Status read_mostly(RangeId id, bool on) { return advise_copies(id, on, false); }

  // sleep.cpp. Why a sleep cannot be: kBadState when a running op uses some of the units,
  // kOutOfHostMemory, kNotSupported where memory cannot move. Nothing changed then.
  Status check_sleep(const SleepRequest& wanted);
  // Submits the moves. `bytes`: of device memory that this gives back.
  Status sleep(const SleepRequest& wanted, std::size_t& bytes);
  // Waits until the lane out has issued all that it was given; an error if any of it failed.
  Status finish_sleep();
  // Brings back what fits of the tags, from the sleep of that number or (0) of any, so that units
  // are by last use as they were; and all that the program holds, in whoever's place.
  // kOutOfDeviceMemory where running ops leave it none. `bytes`: how many that is.
  Status wake(std::uint32_t tags, std::uint64_t number, std::size_t& bytes);
  // Of what a sleep sent away: bytes that have not come back.
  std::size_t asleep_bytes() const;

  // Evicts down to the new limits. kOutOfDeviceMemory when what is pinned exceeds them.
  Status set_limits(Limits limits);
  // Makes room for them where it can; an allocation does it otherwise.
  void set_outside_bytes(std::size_t bytes);
  void set_policy(std::unique_ptr<Policy> policy);

  const Limits& limits() const { return limits_; }
  const Policy& policy() const { return *policy_; }
  Policy& policy() { return *policy_; }
  View view() const;
  const Ledger& ledger() const { return ledger_; }
  Ledger& ledger() { return ledger_; }
  const Counters& counters() const { return counters_; }
  bool managed() const { return managed_; }
  // Driver calls that failed in op hooks, where nobody can be told; faults make up for them.
  std::uint64_t hook_errors() {
    return hook_errors_ + in_.failures() + out_.failures() + local_.failures();
  }

 private:
  // A unit that sleeps, as long as it was neither born anew nor brought in since.
  struct Sleeper {
    RangeId id;
    std::uint64_t born, arrival, number;
  };
  bool active() const { return managed_ && policy_->active(); }
  // A driver whose prefetch to the host takes a thread of its own, and time, is given a head start.
  bool asynchronous() const { return place_.context != nullptr; }
  bool away(RangeId id) const { return ledger_.away(id); }
  std::size_t taken() const { return ledger_.resident_bytes() + limits_.outside_bytes; }
  // Of the budget, beside what is in use outside of umem.
  std::size_t share() const {
    return limits_.budget_bytes - std::min(limits_.outside_bytes, limits_.budget_bytes);
  }
  bool fits(std::size_t bytes) const { return taken() + bytes <= limits_.budget_bytes; }
  bool quiet(cu::CUstream stream);
  bool host_has_room(RangeId id);
  Status check_host(std::size_t bytes);
  Status admit_unmanaged(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family);
  void retire_piece(RangeId id);
  Status admit_piece(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family,
                     cu::CUstream stream);
  Status settle(RangeId id, bool had_frames, cu::CUstream stream);
  Status admit_shared(RangeId id, std::size_t bytes, Tag tag, Family family, cu::CUstream stream);
  void retire_shared(RangeId id);
  void drop_shared(std::size_t bytes);
  Status discard_spans(const std::vector<backing::Span>& spans);
  void lose_track_of_shared(bool drop);
  bool make_room(std::size_t bytes);
  void discard_dead(std::size_t bytes);
  void evict_ahead();
  void evict_preferred(std::size_t wanted);
  void bring(RangeId id);
  Status advise_copies(RangeId id, bool on, bool by_policy);
  void keep_copies(std::vector<RangeId> wanted);
  Status begin_copy(RangeId id);
  void end_copy(RangeId id);
  Status discard(const std::vector<RangeId>& ids);
  Status populate(RangeId id);
  Status send_out(const std::vector<RangeId>& victims);
  Status send_back(const std::vector<RangeId>& ids);
  Status submit_out(Verb verb, const std::vector<RangeId>& ids);
  Status fetch(const std::vector<RangeId>& ids, const cu::CUstream* consumer);
  Status wait_for_room(Lane& lane);
  Status await(Ticket arrival, Ticket populated, cu::CUstream stream);
  Status after_home(RangeId id);
  bool asleep(const Sleeper& sleeper) const;
  bool sleeps(RangeId id) const;
  std::vector<RangeId> sleepy(const SleepRequest& wanted) const;
  std::size_t missing_on_host(const std::vector<RangeId>& ids) const;
  Status lay_down(const std::vector<RangeId>& ids);
  Status lose(const std::vector<RangeId>& ids);
  Status release_shared();
  std::vector<Sleeper> take_sleepers(std::uint32_t tags, std::uint64_t number);
  void note(const Status& status) { hook_errors_ += status.ok() ? 0 : 1; }
  backing::Span span(RangeId id) const { return {ranges_[id].base, ledger_.at(id).bytes}; }
  const std::vector<backing::Span>& spans_of(const std::vector<RangeId>& ids);

  const driver::Table& table_;
  const backing::RangeTable& ranges_;
  const driver::Place place_;
  const bool managed_;
  Lane in_, out_;
  // Populates and discards: nothing of theirs crosses the link, so they do not queue behind what
  // does. Each waits for what it needs of the other lanes.
  Lane local_;
  Ticket last_discard_ = 0;
  Streams streams_;
  Limits limits_;
  std::unique_ptr<Policy> policy_;
  Ledger ledger_;
  SharedPages shared_;
  Counters counters_;
  std::function<void()> release_cached_;
  std::uint64_t hook_errors_ = 0;
  std::vector<RangeId> copied_;  // read-mostly by the policy's wish; some may have died
  std::vector<Sleeper> sleepers_;
  std::uint64_t failures_before_sleep_ = 0;
  // Scratch, so that an op costs no malloc.
  std::vector<RangeId> wanted_, victims_, moved_, dropped_, one_, leaving_, preferred_, admitted_;
  std::vector<RangeId> group_, rewritten_;
  std::vector<backing::Span> spans_;
  std::vector<cu::CUevent> events_;
};

}  // namespace umem::residency
