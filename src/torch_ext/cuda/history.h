// torch's records of an allocator: a trace of its events, the stack of each live block, and the
// observers of every event.
#pragma once
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ApproximateClock.h>

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena/stats.h"

namespace umem::torch_ext {

class History {
 public:
  using Context = std::shared_ptr<c10::GatheredContext>;
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  using Level = c10::CachingDeviceAllocator::RecordContext;
  using Tracker = c10::CachingDeviceAllocator::AllocatorTraceTracker;
  using Recorder = c10::CachingDeviceAllocator::CreateContextFn;
  using Snapshot = c10::cuda::CUDACachingAllocator::SnapshotInfo;

  // The calling stack of events inside the scope, if stacks of `level` are recorded. Made before
  // the runtime is called: gathering a stack takes the GIL, and a device's lock is held when an
  // event arrives. `freed`: the block that this thread frees; all others that are freed in the
  // scope were left by other threads because this one used the device, and have the stack of their
  // allocation, as in torch's own allocator.
  class Scope {
   public:
    Scope(History& history, Level level, const void* freed = nullptr)
        : entered_(history.wants_stack(level)) {
      if (C10_UNLIKELY(entered_)) history.enter();  // which may free blocks
      around_ = std::exchange(t_freed, reinterpret_cast<std::uintptr_t>(freed));
    }
    ~Scope() {
      t_freed = around_;
      if (C10_UNLIKELY(entered_)) leave();
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const bool entered_;
    std::uintptr_t around_;
  };

  void record(bool enabled, Recorder recorder, std::size_t max_entries, Level when, bool clear,
              const std::vector<std::string>& skip_actions);
  bool recording() const { return recording_.load(std::memory_order_relaxed); }
  void add_tracker(Tracker tracker);
  // Starts following events, so that `last_event` exists for torch's profiler.
  void follow() {
    if (!follow_.load(std::memory_order_relaxed)) start_following();
  }
  // The last block that this thread requested or freed; only where `follow` was called before.
  static const arena::Event& last_event() { return t_last; }

  void out_of_memory(int device, std::size_t free_bytes, std::size_t bytes, std::uintptr_t stream);
  Context context_of(const void* ptr);
  // Annotates a block that was made while recording.
  void annotate(const void* ptr, const std::string& metadata);
  // Both are the calling thread's.
  static void set_user_metadata(const std::string& metadata);
  static void push_compile_context(const std::string& context);
  static void pop_compile_context();

  // Adds umem's segments of devices below `device_count`, and their records.
  void append_to(Snapshot& snapshot, int device_count, bool include_traces);

 private:
  struct Live {
    Context context;
    int device;
    std::size_t bytes;
    std::uintptr_t stream;
  };
  using LiveMap = std::unordered_map<std::uintptr_t, Live>;  // by address

  bool wants_stack(Level level) const {
    return level_.load(std::memory_order_relaxed) >= static_cast<int>(level);
  }
  void start_following();
  void enter();
  static void leave();
  void listen();
  static void on_event(const arena::Event& event);
  void handle(const arena::Event& event);
  void keep_live(const arena::Event& event);
  void add_entry(Entry::Action action, int device, std::size_t address, std::size_t bytes,
                 std::uintptr_t stream, const Context& context, const std::string& metadata);
  void append_segments(Snapshot& snapshot, int device);
  void append_traces(Snapshot& snapshot);

  static thread_local arena::Event t_last;
  static constinit thread_local std::uintptr_t t_freed;

  std::atomic<bool> recording_{false};
  std::atomic<int> level_{0};  // stacks up to this level are gathered
  std::atomic<Recorder> recorder_{nullptr};
  std::atomic<bool> follow_{false};

  std::mutex control_;  // taken before `mutex_`, which follows the runtime's
  bool tracked_ = false;

  std::mutex mutex_;
  std::optional<c10::ApproximateClockToUnixTimeConverter> clock_;
  std::size_t max_entries_ = 1;
  std::vector<Entry::Action> skipped_;
  std::vector<Tracker> trackers_;
  std::map<int, std::deque<Entry>> traces_;  // by device, of at most `max_entries_` each
  LiveMap blocks_, segments_;                // made while recording
};

}  // namespace umem::torch_ext
