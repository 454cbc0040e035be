// The recorder keeps the reports of the runtime's hooks as a log of events in memory. One log
// orders all threads and devices: every call except `recording` needs the recorder's lock, which is
// taken after a device's and before no other. Nothing waits for a device under it.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/export.h"
#include "driver/place.h"
#include "driver/table.h"
#include "trace/block_map.h"
#include "trace/events.h"
#include "trace/op_timer.h"
#include "trace/timers.h"

namespace umem::trace {

// The consumers of events. Each starts, takes and stops on its own; ids of blocks are common.
enum Sink { kPlan, kFile, kSinks };

// The max number of events that a sink has not taken: further ones are only counted, until all
// sinks have stopped.
inline constexpr std::size_t kMaxEvents = 2'000'000;

struct LiveBlock {
  std::uintptr_t address;
  std::size_t bytes;
  const char* tag;
  const char* family;
  int device;
};

// An op's use of a block: all of it, or its bytes `begin` to `end`.
struct Used {
  std::uintptr_t address = 0;      // of the block
  std::size_t begin = 0, end = 0;  // end 0: all
};

extern std::atomic<bool> g_recording;
inline bool recording() {
  return g_recording.load(std::memory_order_relaxed);
}

class Recorder {
 public:
  // `live`: returns the live blocks, called if no sink was recording. `by_events`: times of ops
  // come from events on their streams, else from the host's clock.
  void start(Sink sink, const std::vector<LiveBlock>& live, bool by_events);
  void stop(Sink sink);
  // In a forked child: the records and the driver's events are the parent's; the latter are not
  // touched.
  void leave_to_parent();
  bool on(Sink sink) const { return sinks_[sink].on; }
  bool any_on() const { return sinks_[kPlan].on || sinks_[kFile].on; }

  // An op that is not a scope marker begins with these inputs: the first `overwritten` are written
  // whole and not read, the further ones up to `written` are changed.
  void begin(OpTimer& span, const Used* inputs, std::size_t count, std::size_t overwritten,
             std::size_t written);
  // The op is about to run there.
  void time(OpTimer& span, const driver::Table& table, const driver::Place& place,
            cu::CUstream stream);
  // Work of umem's own in the op begins and ends, such as making room for its result: it does not
  // count in the op's time.
  void pause(OpTimer& span, cu::CUstream stream);
  void resume(OpTimer& span, cu::CUstream stream);
  // `maker`: the op that runs, when it is not a scope marker.
  void alloc(std::uintptr_t address, std::size_t bytes, const char* tag, const char* family,
             int device, OpTimer* maker);
  void free(std::uintptr_t address);
  void tag(std::uintptr_t address, const char* tag);
  // The op's work is given out.
  void timed(OpTimer& span, cu::CUstream stream, OpTimer* parent);
  // `tag`: for the blocks that the op leaves; null: unknown.
  void end(OpTimer& span, const char* name, const char* tag, const char* family);
  void step();

  // The events that the sink has not taken. `all`: including those that open ops may still change;
  // the caller first waits for times, without the lock.
  Batch take(Sink sink, bool all);
  // Returns what waits for the times of the ops that ended.
  std::function<void()> times();
  std::size_t waiting(Sink sink) const;  // events not taken yet

 private:
  struct SinkState {
    bool on = false;
    std::uint64_t next = 0;     // number of the first event not taken
    std::vector<Event> before;  // allocs of the blocks alive at the start, by id
    std::uint64_t dropped_before = 0;
    // For a plan: blocks allocated by helpers that no op of the program's own has used.
    std::unordered_map<std::uint32_t, Event> from_helpers;
  };

  OpenOp* open(OpTimer& span);
  int start(Timers& timers, cu::CUstream stream);
  void close(OpTimer& span);
  bool current(const OpTimer& span) const;
  void add(const Used& used, std::uint32_t id, std::uint64_t list);
  Event* log(Event event);
  Event* event_at(std::uint64_t number);
  void rename(const Block& block);  // its alloc event gets the block's tag
  void resolve();
  void leave_out_helpers(SinkState& state, Batch& batch) const;
  std::uint64_t settled() const;
  void trim();
  void clear();

  std::array<SinkState, kSinks> sinks_;
  BlockMap blocks_;
  std::uint32_t next_id_ = 1;
  std::vector<Event> events_;  // the first is number first_event_
  std::uint64_t first_event_ = 0;
  std::vector<std::uint32_t> accesses_;  // the first is number first_access_
  std::uint64_t first_access_ = 0;
  std::vector<Part> parts_;  // of these accesses, in the order of the ops
  std::uint64_t dropped_ = 0;
  std::uint64_t recording_ = 0;  // counts recordings: an op may outlive the one it began in
  std::vector<std::unique_ptr<OpenOp>> ops_;
  std::vector<OpenOp*> spare_ops_;
  std::uint64_t lists_ = 0;  // of accesses
  bool by_events_ = false;
  std::map<int, std::shared_ptr<Timers>> timers_;  // by device
};

// The process's one, never destroyed.
UMEM_API Recorder& recorder();

}  // namespace umem::trace
