// Submits moves of units to the transfer queues, each after the work that it has to wait for.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "engine/engine_state.h"
#include "engine/lane.h"
#include "engine/streams.h"
#include "managed/memory_ops.h"

namespace umem::engine {

class Transfers {
 public:
  explicit Transfers(EngineState& state);

  Status open();
  Status close();

  // Brings the units in. Later work on the consumer waits for their bytes; without a consumer
  // nothing waits. `copies`: all of them are away, with contents.
  Status bring_in(const std::vector<RangeId>& ids, const cu::CUstream* consumer,
                  bool copies = false);
  // Mapped memory only: what page faults do for managed memory. Maps a unit that is away, with its
  // contents if it has any, and waits until this is issued.
  Status make_usable(RangeId id, managed::Where where);
  // Waits until the threads have issued all submissions.
  void finish_issuing();
  // Waits for them, and for all other work on the device.
  Status finish();
  // Populates the unit on the device without a copy.
  Status populate(RangeId id);
  // Drops the dead bytes of the units.
  Status discard(const std::vector<RangeId>& ids);
  // Discards spans whose last moves are given, after all work on the stream.
  Status discard(const std::vector<managed::MemSpan>& spans, cu::CUstream stream, Ticket arrival,
                 Ticket departure);
  // Discards part of a live unit, ordered like a kernel on `stream`: after all earlier and before
  // all later work. False: the driver cannot.
  Result<bool> discard_live(RangeId id, managed::MemSpan part, cu::CUstream stream);
  // Moves the units out after their last use. `copies`: all of them are on the device.
  Status send_back(const std::vector<RangeId>& ids, bool copies = false);
  Status submit_out(Verb verb, const std::vector<RangeId>& ids, bool copies = false);
  // Sends out the bytes that the last discard dropped: this frees their memory, and copies nothing.
  Status send_discarded(const std::vector<RangeId>& ids);
  Result<Ticket> send_discarded(const std::vector<managed::MemSpan>& spans);
  // Makes the stream wait for these arrivals and populations.
  Status await(Ticket arrival, Ticket populated, cu::CUstream stream);
  Status await_discard(cu::CUstream stream) { return drops().make_wait(stream, last_discard_); }

  Lane& in() { return in_; }
  Lane& out() { return out_; }
  // For populates and discards: they do not use the link, so they do not queue behind transfers.
  // Each waits for what it needs of the other lanes.
  Lane& local() { return local_; }
  // For discards. Those of mapped memory wait on a thread for the work that used the bytes, so that
  // a populate need not wait for it: that is a call on the thread of the program.
  Lane& drops() { return state_.mapped() ? drops_ : local_; }
  // Makes the lane wait until at most `allowed` bytes are still leaving the device.
  Status wait_for_room(Lane& lane, std::size_t allowed);
  Streams& streams() { return streams_; }
  // Logs from the next submission until `take_log`. See LaneLog.
  Status start_log();
  std::vector<Transfer> take_log(std::size_t& left_out);
  std::uint64_t failures();

 private:
  Status after_uses(RangeId id);
  Status after_uses_away(const std::vector<RangeId>& ids);
  Status after_home(RangeId id);
  Status after_death(RangeId id);
  Status after_deaths(const std::vector<RangeId>& ids);
  Status after_homes(const std::vector<RangeId>& ids);
  // After `events_`, and after those moves.
  Result<Ticket> submit_discard(const std::vector<managed::MemSpan>& spans, Ticket arrival,
                                Ticket departure);
  const std::vector<managed::MemSpan>& spans_of(const std::vector<RangeId>& ids);

  EngineState& state_;
  std::vector<Lane*> lanes();  // all that are open

  Lane in_, out_, local_, drops_;
  Ticket last_discard_ = 0, last_parts_ = 0;  // the last discard, and the last one of given spans
  Streams streams_;
  // Scratch, so that an op makes no heap allocation.
  std::vector<RangeId> one_, group_;
  std::vector<managed::MemSpan> spans_;
  std::vector<cu::CUevent> events_;
  std::vector<cu::CUstream> homes_;
};

}  // namespace umem::engine
