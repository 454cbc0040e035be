// A lane is a transfer queue: one side stream that moves bytes in one direction, in the order of
// submission.
//
// A real driver's prefetch to the host blocks the thread that calls it until the copies are done,
// so that lane is driven by a thread of its own. So are lanes of mapped memory, whose moves take
// calls at their time: the thread waits for what they come after. Without a thread, `submit` waits.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "driver/place.h"
#include "driver/table.h"
#include "engine/lane_log.h"
#include "engine/lane_meter.h"
#include "engine/watchdog.h"
#include "managed/mapped_memory.h"
#include "managed/memory_ops.h"

namespace umem::engine {

using Ticket = std::uint64_t;  // number of a submission; 0: none

class Lane {
 public:
  // `mapped`: null if the memory is the driver's to move.
  Lane(const driver::Table& table, driver::Place place, bool threaded,
       managed::MappedMemory* mapped = nullptr)
      : table_(table),
        place_(place),
        memory_ops_(table, place.device),
        mapped_(mapped),
        log_(table, place),
        meter_(table, place),
        threaded_(threaded) {}
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  Status open();
  // Waits for the thread, not for the device.
  Status close();

  // Runs the verb on the spans after the events. With a thread, errors are counted in `failures`.
  // `copies`: all their bytes cross the link, so that they may be timed.
  Result<Ticket> submit(Verb verb, const std::vector<managed::MemSpan>& spans,
                        const std::vector<cu::CUevent>& after, bool copies = false);
  // Makes later work on the stream wait for the submission. Waits until the thread has issued it.
  Status make_wait(cu::CUstream stream, Ticket ticket);
  // Makes another lane's later submissions wait.
  Status make_wait(Lane& lane, Ticket ticket);
  // Waits until the thread has issued the submission. Does not need the caller's lock.
  void issue_until(Ticket ticket);
  // The first submission after which at most `allowed` bytes are under way; 0 if that is so now.
  // Without a thread the driver is not polled: all bytes that were submitted later count as under
  // way.
  Ticket until(std::size_t allowed);
  // Bytes under way now; 0 on the software device.
  std::size_t under_way();
  // True if the submission is under way; false on the software device.
  bool under_way(Ticket ticket);
  Ticket last() const { return last_; }
  // Mapped memory only: waits until the submission is issued; an error if its bytes are not usable.
  Status outcome(Ticket ticket);
  // Those with such an error since the last call.
  std::vector<Ticket> take_failed();

  bool can_discard() const { return mapped_ || memory_ops_.can_discard(); }
  std::uint64_t failures();

  // The log requires an open lane and the place's context.
  LaneLog& log() { return log_; }
  LaneMeter::Timed timed() const { return meter_.timed(); }

 private:
  struct Before {
    Lane* lane;
    Ticket ticket;
  };
  struct Job {
    Ticket ticket;
    Verb verb;
    std::vector<managed::MemSpan> spans;
    std::vector<cu::CUevent> after;
    std::vector<Before> before;
    bool copies;
  };
  struct Issued {
    Ticket ticket;
    std::size_t bytes;
    std::uint64_t through;  // bytes submitted up to and including this one
    cu::CUevent event;
  };

  Status issue(Verb verb, const std::vector<managed::MemSpan>& spans,
               const std::vector<cu::CUevent>& after, const std::vector<Before>& before,
               bool copies);
  Status wait_for(Verb verb, const std::vector<managed::MemSpan>& spans,
                  const std::vector<cu::CUevent>& after, const std::vector<Before>& before);
  Status wait_complete(Ticket ticket);
  Status run(Verb verb, const std::vector<managed::MemSpan>& spans);
  Status run_mapped(Verb verb, const std::vector<managed::MemSpan>& spans);
  Status catch_up();
  Status write_back(const std::vector<managed::MemSpan>& spans);
  Status drop(const std::vector<managed::MemSpan>& spans);
  Status finish(Ticket ticket, Verb verb, std::size_t bytes);
  Status record_end(Ticket ticket, std::size_t bytes);
  Result<cu::CUevent> take_event();
  void poll();
  std::size_t bytes_under_way() const;
  Status make(Verb verb, const std::vector<managed::MemSpan>& spans,
              const std::vector<cu::CUevent>& after, const std::vector<Before>& before,
              bool copies);
  // Out of device memory, mapped bytes are usable on the host.
  bool usable(const Status& status) const {
    return mapped_ && status.code() == Code::kOutOfDeviceMemory;
  }
  void note(Ticket ticket, const Status& status);
  void work();

  const driver::Table& table_;
  driver::Place place_;
  managed::MemoryOps memory_ops_;
  managed::MappedMemory* const mapped_;
  LaneLog log_;
  LaneMeter meter_;
  const bool threaded_;
  WatchedCalls* watched_ = nullptr;  // of a real driver only
  cu::CUstream stream_ = nullptr;
  std::atomic<Ticket> last_{0};  // submitted
  std::vector<Before> before_;   // of the next submission

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::deque<Job> waiting_;
  std::size_t waiting_bytes_ = 0;
  Ticket issued_ = 0;
  Ticket missed_ = 0;    // the last one issued, if it has no event
  Ticket complete_ = 0;  // known to be complete
  std::uint64_t issued_bytes_ = 0, complete_bytes_ = 0;
  std::deque<Issued> under_way_;  // by ticket
  std::vector<cu::CUevent> spare_events_;
  std::uint64_t failures_ = 0;
  static constexpr std::size_t kNoted = 64;
  std::deque<std::pair<Ticket, Status>> failed_;  // the last ones
  std::vector<Ticket> untaken_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace umem::engine
