// The arena: sub-allocation of managed ranges. Requests of 2 MiB and more get a range of their own;
// smaller ones share 2 MiB segments. Freed blocks are cached per stream and reused in stream order.
// The arena knows nothing about residency: the runtime joins the two.
//
// Not thread-safe: the device's lock is held around every call.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena/layout.h"
#include "arena/segment_pool.h"
#include "arena/stats.h"
#include "base/status.h"
#include "driver/place.h"
#include "driver/table.h"
#include "managed/range_table.h"

namespace umem::arena {

inline constexpr std::size_t kLargeBytes = kPageBytes;  // and more: own ranges
inline constexpr std::uint32_t kGroups = 3;             // of small blocks

struct Allocation {
  void* ptr = nullptr;
  RangeId range = managed::kNoRange;
  std::size_t bytes = 0;        // the block's size: a multiple of 256 B or 2 MiB
  bool large = false;           // owns its range
  bool first_in_range = false;  // the range's bytes were dead or are fresh
};

struct Freed {
  RangeId range = managed::kNoRange;
  std::size_t bytes = 0;
  // No block in the range is live or pending: all its bytes are dead.
  bool last_in_range = false;
};

struct Block {                           // handed out
  std::size_t bytes = 0, requested = 0;  // 0: there is none
  bool large = false;
};

struct Footprint {
  std::size_t live_bytes = 0;    // in blocks handed out
  std::size_t cached_bytes = 0;  // in freed blocks and unused parts of segments
  std::size_t live_blocks = 0;
};

class Arena {
 public:
  // With a freer, ranges are removed at once, and the freer returns their memory to the driver.
  Arena(const driver::Table& table, managed::RangeTable& ranges, driver::Place place,
        managed::Freer* freer = nullptr)
      : table_(table), ranges_(ranges), place_(place), freer_(freer) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Called with a block before it is counted and reported; may refuse it.
  using Admit = std::function<Status(const Allocation&)>;
  // `bytes` > 0. Fails like `admit` and RangeTable::create, or with kOutOfHostMemory if the request
  // exceeds any address space. Small blocks of different groups share no segment.
  Result<Allocation> allocate(std::size_t bytes, cu::CUstream stream, std::uint32_t group = 0,
                              const Admit& admit = {});
  // kInvalidArgument if `ptr` is not the start of a live block (a double free, a foreign pointer).
  // A block that other streams use becomes pending, and is reusable after `poll` found their work
  // done; if the driver refuses an event, `poll` retries.
  Result<Freed> free(void* ptr);
  // The block is in use on `stream` too.
  Status record_stream(void* ptr, cu::CUstream stream);
  // Makes pending blocks reusable if their streams are done. Appends to `dead` the ranges that have
  // no live or pending block afterwards.
  Status poll(std::vector<RangeId>* dead);
  // Returns ranges without live or pending blocks to the driver, longest unused first, until at
  // most `keep_bytes` are cached. `leaving` is called for each before its addresses are freed, and
  // may refuse. With `idle`, only those that no block was in for two whole steps.
  Status trim(std::size_t keep_bytes, const std::function<bool(RangeId)>& leaving,
              bool idle = false);
  // Appends events that are reached when the streams of pending blocks are done; `poll` makes the
  // blocks reusable then.
  Status pending_events(std::vector<cu::CUevent>& events);
  bool any_pending() const { return !pending_.empty(); }

  // From now on large blocks are placed by the layout, while the program's steps match it.
  // kBadState while blocks of an earlier layout are live; that layout serves no more blocks, so a
  // later call finds it idle.
  Status install_layout(const std::vector<LayoutEntry>& entries, std::size_t bytes);
  // Returns an idle layout's range to the driver.
  Status remove_layout();
  const Layout* layout() const { return layout_.get(); }  // null: there is none
  void retire_layout() {
    if (layout_) layout_->retire();
  }
  void step_ended();

  Footprint footprint() const {
    return {static_cast<std::size_t>(stats_.allocated_bytes[kAll].current), cached_bytes_,
            static_cast<std::size_t>(stats_.allocations[kAll].current)};
  }
  ArenaStats& stats() { return stats_; }
  // The live block that starts at `ptr`.
  Block block_at(const void* ptr) const;
  // All ranges with their blocks, by address.
  std::vector<SegmentRow> describe() const;
  // The listener is called with every allocation, release and range; null: no listener.
  void set_listener(const std::atomic<Listener>* listener) { listener_ = listener; }
  // Asserts that the free lists contain each free block once, and that the sums are correct. A full
  // scan, for tests.
  void check_invariants() const;

 private:
  struct Slot {  // the arena's record of a range
    // A subrange belongs to the layout's range.
    enum class Kind : unsigned char { kNone, kLarge, kSegment, kSubrange } kind = Kind::kNone;
    std::uint32_t pool = 0, group = 0;
    std::uint32_t live = 0, pending = 0;   // blocks
    std::size_t bytes = 0, requested = 0;  // of the live or pending large block
    std::uint64_t emptied = 0;             // when the last block was freed; for trim's order
    // Links in the free list of large ranges.
    RangeId next_cached = managed::kNoRange, previous_cached = managed::kNoRange;
  };
  struct Pool {  // one per stream
    cu::CUstream stream = nullptr;
    std::array<SegmentPool, kGroups> small;
    std::unordered_map<std::size_t, RangeId> large;  // range bytes -> stack of cached ranges
  };
  struct Pending {
    RangeId range = managed::kNoRange;
    std::vector<cu::CUstream> streams;  // streams whose event is still to be recorded
    std::vector<std::pair<cu::CUevent, cu::CUcontext>> events;
  };

  bool empty(RangeId range) const { return slots_[range].live == 0 && slots_[range].pending == 0; }
  std::uint32_t pool_of(cu::CUstream stream);
  Result<RangeId> new_range(std::size_t bytes, Slot::Kind kind, std::uint32_t pool);
  void record_allocation(const Allocation& block, std::size_t requested);
  void record_inactive(const Allocation& block, bool taken);
  void notify(EventKind kind, std::uintptr_t address, std::size_t bytes, std::size_t requested,
              std::uint32_t pool) const;
  Result<Allocation> allocate_large(std::size_t bytes, std::uint32_t pool);
  Result<RangeId> cached_or_new(std::size_t bytes, std::uint32_t pool);
  Result<Allocation> allocate_small(std::size_t bytes, std::uint32_t pool, std::uint32_t group);
  std::size_t count_segments(const Pool& pool) const;  // of all groups
  SegmentPool& segments_of(const Slot& slot) { return pools_[slot.pool]->small[slot.group]; }
  const SegmentPool& segments_of(const Slot& slot) const {
    return pools_[slot.pool]->small[slot.group];
  }
  std::uint32_t unit_of(const void* ptr, RangeId range) const;    // of the segment
  std::size_t block_bytes(const void* ptr, RangeId range) const;  // 0: no live block starts there
  void reclaim(void* ptr, RangeId range);
  void put_back(void* ptr, RangeId range, std::size_t bytes);
  Status record_events(Pending& pending);
  Status finished(Pending& pending, bool& done);
  Status destroy(RangeId range);
  void link_cached(RangeId range);
  void unlink_cached(RangeId range);
  SegmentRow describe_layout() const;
  void record_layout(const LayoutStatus& layout, std::int64_t sign);

  const driver::Table& table_;
  managed::RangeTable& ranges_;
  driver::Place place_;
  managed::Freer* const freer_;
  std::vector<Slot> slots_;
  std::vector<std::unique_ptr<Pool>> pools_;
  std::unordered_map<void*, std::vector<cu::CUstream>> recorded_;
  std::unordered_map<void*, Pending> pending_;  // freed, but still in use on other streams
  std::map<cu::CUcontext, std::vector<cu::CUevent>> spare_events_;
  std::unique_ptr<Layout> layout_;
  ArenaStats stats_;
  std::size_t cached_bytes_ = 0;
  std::uint32_t empty_segments_ = 0;
  const std::atomic<Listener>* listener_ = nullptr;
  std::uint64_t clock_ = 0;
  std::array<std::uint64_t, 3>
      step_ends_{};  // the clock at the ends of the last steps, newest last
};

}  // namespace umem::arena
