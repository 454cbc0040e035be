// The engine carries out what the policy says, within the budget. It acts between the facts
// (ledger) and the choice (policy).
//
// A wrong decision here costs time only: bytes that are not where an op needs them fault in. The
// one exception is a discard, which is why only units without a live block are ever discarded, and
// only after all that their stream had been given when the last block in them was freed.
//
// Not thread-safe but for `wait_issued`: the device's lock is held around every call.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/status.h"
#include "driver/place.h"
#include "engine/engine_state.h"
#include "engine/hints.h"
#include "engine/moves.h"
#include "engine/sharing.h"
#include "engine/sleep.h"
#include "engine/transfers.h"
#include "engine/workspaces.h"
#include "engine/write_back.h"
#include "engine/zero_copy.h"
#include "managed/range_table.h"

namespace umem::engine {

class Engine {
 public:
  // `release_cached` gives the ranges without live blocks back to the driver (and `forget`s them):
  // the way to room where dead bytes cannot be discarded, or host memory of dead ranges is in the
  // way. Memory that is not `managed` never moves: the budget bounds what is handed out.
  Engine(const driver::Table& table, const managed::RangeTable& ranges, driver::Place place,
         bool managed, Limits limits, const policy::Policy& policy,
         std::function<void()> release_cached);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  Status open();
  Status close();

  // The range got its first live block, on `stream`, in its first `bytes`. Makes room and populates
  // them on the device, piece by piece; what does not fit is used on the host (zero_copy.h).
  // kOutOfHostMemory when live bytes would exceed budget + host budget, or the block alone exceeds
  // the budget and the host has no room for it; kOutOfDeviceMemory when memory that cannot move
  // does not fit. Nothing changed then.
  Status admit(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family,
               cu::CUstream stream);
  // A further block of an admitted range was handed out: brings the range in if it is away.
  void prepare(RangeId id);
  // The range lost its last live block, and no stream but its own works on it: its bytes are dead.
  // On a GPU it makes no call of the driver that may wait: a tensor's deleter may not.
  void retire(RangeId id);
  // Makes the calls that `retire` left: before a range is handed out again.
  void finish_retired() {
    if (!retired_.empty()) finish_all_retired();
  }
  // The range goes back to the driver, after the moves up to the ticket have been issued.
  Ticket forget(RangeId id);
  // Of all that was sent out so far.
  Ticket last_departure() { return transfers_.out().last(); }
  // LaneLog, of all lanes. Neither needs the device's lock.
  Status start_log();
  std::vector<Transfer> take_log(std::size_t& left_out);
  // Waits until the driver was given the moves up to the ticket.
  void wait_issued(Ticket ticket) { transfers_.out().issue_until(ticket); }
  // An op that has ended left these to a collective, which goes on on a stream that is not known,
  // or on a thread. They stay until an op uses them again, the step ends or nothing else can leave;
  // of what is more than a quarter of the budget those that came first may leave.
  void begin_collective(const RangeId* ids, std::size_t count);
  // An op is using some of the range.
  bool in_use(RangeId id) const;
  // Before the range's units are cut into smaller ones: ends the advice that the engine gave for
  // them. The program's pins are off them. False where they stay as they are: an op uses one, a
  // graph is captured, or more than the policy knows them by their ids (workspaces, what sleeps,
  // live blocks of a layout).
  bool begin_cut(RangeId id);
  // The piece was cut: what it has from its byte `at` on is the piece `rest`.
  void split(RangeId piece, RangeId rest, std::size_t at);

  // Of units, each a whole range or a piece of a larger one. Before an op on `stream`: pins the
  // units and brings in those that are away.
  void begin_use(const RangeId* ids, std::size_t count, cu::CUstream stream);
  // After it: unpins them and marks them as used now.
  void end_use(const RangeId* ids, std::size_t count, cu::CUstream stream);
  // Once for each op, after all its `end_use`: the policy learns of it, and its pending requests
  // are applied.
  void op_ended(const OpUse& op, cu::CUstream stream);
  // After `end_use` of an op that allocated: the units that it made and that live on.
  void left_behind(const RangeId* ids, std::size_t count, Family family);
  // How many bytes a library asks for where it takes a workspace inside an op (workspaces.h).
  void set_workspace_sizes(std::vector<std::size_t> sizes) {
    workspaces_.set_sizes(std::move(sizes));
  }
  // The program's step.
  void step_ended();
  // Bytes that have to be evicted for `bytes` more; 0 where nothing is ever evicted.
  std::size_t shortage(std::size_t bytes) const;
  // The units that leave first when room is made next, if they may: the answer of a victim
  // callback. Until the next call.
  void set_preferred_victims(std::vector<RangeId> ids) {
    moves_.set_preferred_victims(std::move(ids));
  }
  // The driver moves pages as it likes from here on: for the end of a session.
  void end_zero_copy() { zero_copy_.clear(); }
  // Applies the policy's pending requests; `stream` is where compute may have to wait.
  void apply_pending(cu::CUstream stream);

  // Evicts down to the new limits. kOutOfDeviceMemory when what is pinned exceeds them.
  Status set_limits(Limits limits);
  // Makes room for them where it can; an allocation does it otherwise.
  void set_outside_bytes(std::size_t bytes);
  // Plans of the policy before are forgotten.
  void set_policy(const policy::Policy& policy);

  Hints& hints() { return hints_; }
  const Hints& hints() const { return hints_; }
  Sleep& sleep() { return sleep_; }
  Sharing& sharing() { return sharing_; }

  const Limits& limits() const { return state_.limits; }
  const policy::Policy& policy() const { return *state_.policy; }
  // Null: the policy follows no plans.
  policy::Planned* planned() { return state_.planned.get(); }
  // Whether there are plans that it follows.
  bool follows_plans() const { return state_.follows_plans(); }
  // Whether units are evicted and fetched at all.
  bool active() const { return state_.active(); }
  CandidateView view() const { return state_.view(); }
  const Ledger& ledger() const { return state_.ledger; }
  Ledger& ledger() { return state_.ledger; }
  const Counters& counters() const { return state_.counters; }
  bool managed() const { return state_.managed; }
  // Device memory that the driver holds for umem's addresses, with contents or without. An
  // estimate: others may have got what is without, and faults that nothing saw are missing.
  std::size_t attached_bytes() const { return state_.attached_bytes(); }
  // Of these, what is known to be without contents.
  std::size_t unused_bytes() const;
  // The device's memory before umem took any of it.
  void set_memory(std::size_t free_bytes, std::size_t total_bytes) {
    state_.total_bytes = total_bytes;
    state_.others_bytes = total_bytes - std::min(total_bytes, free_bytes);
  }
  // What is free now.
  void observe_memory(std::size_t free_bytes) { state_.observe_memory(free_bytes); }
  // The driver has taken back what is without contents.
  void forget_unused();
  // Asserts what must hold between calls. A full scan, for tests.
  void check_invariants() const;
  // Driver calls that failed in op hooks, which cannot return an error; faults make up for them.
  std::uint64_t hook_errors() { return state_.errors + transfers_.failures(); }

 private:
  Status check_host(std::size_t bytes);
  Status admit_unmanaged(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family);
  void tell_policy(RangeId admitted);
  Status admit_piece(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family,
                     cu::CUstream stream);
  Status settle(RangeId id, bool had_frames, cu::CUstream stream);
  bool use_on_host(RangeId id);
  void retire_piece(RangeId id);
  bool retire_later(RangeId id);
  void finish_all_retired();

  // Each part refers to those before it.
  EngineState state_;
  Transfers transfers_;
  Sharing sharing_;
  ZeroCopy zero_copy_;
  Moves moves_;
  WriteBack write_back_;
  Sleep sleep_;
  Hints hints_;
  Workspaces workspaces_;
  // Of dead bytes, what the driver is still to be told.
  struct Retired {
    RangeId id;
    managed::MemSpan span;
    cu::CUstream stream;
    Ticket arrival, departure;
    bool read_mostly, here, discard;
  };
  std::vector<Retired> retired_;
  // Scratch, so that an op costs no malloc.
  std::vector<RangeId> wanted_, moved_, dropped_, one_, leaving_, admitted_;
};

}  // namespace umem::engine
