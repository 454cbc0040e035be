// The engine carries out the policy's choices within the budget. It connects the facts (ledger) and
// the choice (policy).
//
// A wrong decision here only costs time: bytes that are not where an op needs them fault in. The
// exception is a discard, so only units without a live block are discarded, after all work that
// their stream had been given when their last block was freed. Mapped memory does not fault in:
// each use of it by an op is prepared for, and a move waits for all uses.
//
// Not thread-safe except `wait_issued`: the device's lock is held around every call.
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
  // `release_cached` returns ranges without live blocks to the driver (and `forget`s them). It
  // makes room if dead bytes cannot be discarded, or dead ranges hold host memory that is needed.
  // Memory that is not `managed` never moves: the budget bounds the memory that is handed out.
  Engine(const driver::Table& table, const managed::RangeTable& ranges, driver::Place place,
         bool managed, const policy::Policy& policy, std::function<void()> release_cached);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Before any other call but `set_memory`.
  Status open(Limits limits);
  Status close();

  // The range got its first live block, on `stream`, in its first `bytes`. Makes room and populates
  // them on the device, piece by piece; what does not fit is used on the host (zero_copy.h).
  // kOutOfHostMemory if live bytes would exceed budget + host budget, or the block alone exceeds
  // the budget and the host has no room for it; kOutOfDeviceMemory if memory that cannot move does
  // not fit. On failure nothing has changed.
  Status admit(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family,
               cu::CUstream stream);
  // Another block of an admitted range was handed out: brings the range in if it is away.
  void prepare(RangeId id);
  // The range lost its last live block, and only its own stream still works on it: its bytes are
  // dead. On a GPU this makes no driver call that may wait, because a tensor's deleter must not
  // wait.
  void retire(RangeId id);
  // Makes the calls that `retire` deferred, before a range is handed out again.
  void finish_retired() {
    if (!retired_.empty()) finish_all_retired();
  }
  // Call it before the range is returned to the driver, which must come after the moves up to the
  // ticket are issued.
  Ticket forget(RangeId id);
  // Bytes of the budget that are kept free while a plan moves others, so that a new block need not
  // wait until they have left: only of mapped memory, whose addresses must have memory before an op
  // is launched.
  std::size_t room_ahead() const { return moves_.room_ahead(); }
  // The ticket of the last move out.
  Ticket last_departure() { return transfers_.out().last(); }
  // Transfers that were timed, each way.
  LaneMeter::Timed timed_in() { return transfers_.in().timed(); }
  LaneMeter::Timed timed_out() { return transfers_.out().timed(); }
  // Start and take the LaneLogs of all lanes. They do not need the device's lock.
  Status start_log();
  std::vector<Transfer> take_log(std::size_t& left_out);
  // Waits until the moves up to the ticket are issued to the driver.
  void wait_issued(Ticket ticket) { transfers_.out().issue_until(ticket); }
  // An op that has ended left these units to a collective, which continues on an unknown stream or
  // on a thread. They stay until an op uses them again, the step ends or nothing else can be
  // evicted. Beyond a quarter of the budget, the oldest of them may be evicted.
  void begin_collective(const RangeId* ids, std::size_t count);
  // True if an op is using part of the range.
  bool in_use(RangeId id) const;
  // Host memory that the driver holds for the range.
  std::size_t host_bytes(RangeId id) const;
  // Call it before the range's units are cut, with the program's pins taken off: ends the advice
  // that the engine gave for them. False if they must stay whole: an op uses one, a graph is
  // captured, the memory is mapped, or their ids are known elsewhere (workspaces, sleeping units,
  // live blocks of a layout).
  bool begin_cut(RangeId id);
  // The piece was cut: its bytes from `at` on are the piece `rest`.
  void split(RangeId piece, RangeId rest, std::size_t at);

  // An op is about to write these units: call it before `begin_use`.
  void will_write(const RangeId* ids, std::size_t count);
  // Call it before an op on `stream` with its units, each a whole range or a piece: pins them and
  // brings in those that are away.
  void begin_use(const RangeId* ids, std::size_t count, cu::CUstream stream);
  // Call it after the op: unpins the units and marks them as used now. `inner`: another op of this
  // thread continues, and may use what this one allocated.
  void end_use(const RangeId* ids, std::size_t count, cu::CUstream stream, bool inner = false);
  // The op around an inner op has ended, which had left the unit that was born then: nothing uses
  // it unseen any more, unless it is a workspace.
  void outermost_ended(RangeId id, std::uint64_t born);
  // Call it once per op, after all its `end_use`: tells the policy, and applies its pending
  // requests.
  void op_ended(const OpUse& op, cu::CUstream stream);
  // Call it after `end_use` of an op that allocated, with its units that live on.
  void left_behind(const RangeId* ids, std::size_t count, Family family);
  // The sizes of a library's workspaces that it allocates inside ops (workspaces.h).
  void set_workspace_sizes(std::vector<std::size_t> sizes) {
    workspaces_.set_sizes(std::move(sizes));
  }
  // The program's step ended.
  void step_ended();
  // True if `bytes` more fit without an eviction, once dead bytes have left.
  bool fits_beside_live(std::size_t bytes) const {
    return state_.taken() - state_.ledger.dead_bytes() + bytes <= state_.limits.budget_bytes;
  }
  // Evicts what does not fit beside `bytes` more; false if they do not fit even so.
  bool make_room(std::size_t bytes);
  // Bytes that must be evicted to fit `bytes` more; 0 if nothing is ever evicted.
  std::size_t shortage(std::size_t bytes) const;
  // The units to evict first, if they may be evicted, until the next call: a victim callback's
  // answer.
  void set_preferred_victims(std::vector<RangeId> ids) {
    moves_.set_preferred_victims(std::move(ids));
  }
  // Mapped memory only: waits for all work on the device, also what umem has not seen.
  void finish_moves();
  // Leaves residency to the driver from now on: the end of a session. Mapped memory is made usable.
  void end_moves();
  // Applies the policy's pending requests; `stream` is the one where compute may have to wait.
  void apply_pending(cu::CUstream stream);

  // Evicts down to the new limits. kOutOfDeviceMemory if pinned bytes exceed them.
  Status set_limits(Limits limits);
  // Makes room for them if it can; otherwise the next allocation does.
  void set_outside_bytes(std::size_t bytes);
  // The previous policy's plans are forgotten.
  void set_policy(const policy::Policy& policy);

  Hints& hints() { return hints_; }
  const Hints& hints() const { return hints_; }
  Sleep& sleep() { return sleep_; }
  Sharing& sharing() { return sharing_; }

  const Limits& limits() const { return state_.limits; }
  const policy::Policy& policy() const { return *state_.policy; }
  // Null: the policy follows no plans.
  policy::Planned* planned() { return state_.planned.get(); }
  // True if the policy has plans.
  bool follows_plans() const { return state_.follows_plans(); }
  // True if units are evicted and fetched at all.
  bool active() const { return state_.active(); }
  CandidateView view() const { return state_.view(); }
  const Ledger& ledger() const { return state_.ledger; }
  Ledger& ledger() { return state_.ledger; }
  const Counters& counters() const { return state_.counters; }
  bool managed() const { return state_.managed; }
  bool mapped() const { return state_.mapped() != nullptr; }
  // Device memory that the driver holds for umem's addresses, with or without contents. An
  // estimate: the driver may have given memory without contents to others, and unobserved faults
  // are missing.
  std::size_t attached_bytes() const { return state_.attached_bytes(); }
  // The part that is known to be without contents.
  std::size_t unused_bytes() const;
  // The device's memory before umem took any of it.
  void set_memory(std::size_t free_bytes, std::size_t total_bytes) {
    state_.total_bytes = total_bytes;
    state_.others_bytes = total_bytes - std::min(total_bytes, free_bytes);
  }
  // Records how much memory is free now.
  void observe_memory(std::size_t free_bytes) { state_.observe_memory(free_bytes); }
  // The driver has taken back the memory without contents.
  void forget_unused();
  // Asserts the invariants between calls. A full scan, for tests.
  void check_invariants() const;
  // Failed driver calls in op hooks, which cannot return errors; page faults make up for them.
  std::uint64_t hook_errors() { return state_.errors + transfers_.failures(); }

 private:
  Status check_host(RangeId id, std::size_t bytes);
  Status admit_unmanaged(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family);
  void tell_policy(RangeId admitted);
  Status admit_piece(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family,
                     cu::CUstream stream);
  Status settle(RangeId id, bool had_frames, cu::CUstream stream);
  bool use_on_host(RangeId id);
  bool stays_on_host(RangeId id) const;
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
  // Driver calls that `retire` deferred.
  struct Retired {
    RangeId id;
    managed::MemSpan span;
    cu::CUstream stream;
    Ticket arrival, departure;
    bool read_mostly, here, discard;
  };
  std::vector<Retired> retired_;
  // Scratch, so that an op makes no heap allocation.
  std::vector<RangeId> wanted_, moved_, dropped_, one_, leaving_, admitted_;
};

}  // namespace umem::engine
