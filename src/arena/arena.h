// The arena: sub-allocation of managed ranges. Requests of 2 MiB and more get a range of their
// own; smaller ones share 2 MiB segments. Freed blocks are cached by stream and reused in stream
// order. The arena knows nothing of residency: the runtime joins the two.
//
// Not thread-safe: the runtime's lock is held around every call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "arena/layout.h"
#include "arena/segment_pool.h"
#include "arena/tallies.h"
#include "backing/range_table.h"
#include "base/status.h"
#include "driver/place.h"
#include "driver/table.h"

namespace umem::arena {

inline constexpr std::size_t kLargeBytes = kPageBytes;  // requests from here on own a range

struct Allocation {
  void* ptr = nullptr;
  RangeId range = backing::kNoRange;
  std::size_t bytes = 0;        // what the block occupies: 256 B or 2 MiB multiples
  bool large = false;           // owns its range
  bool first_in_range = false;  // the range's bytes were dead, or are fresh
};

struct Freed {
  RangeId range = backing::kNoRange;
  std::size_t bytes = 0;
  // No block in the range is live or pending any more: all its bytes are dead.
  bool last_in_range = false;
};

struct Block {                           // one that is handed out
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
  Arena(const driver::Table& table, backing::RangeTable& ranges, driver::Place place)
      : table_(table), ranges_(ranges), place_(place) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // `bytes` > 0. Fails only as RangeTable::create does, or with kOutOfHostMemory for a request that
  // no address space could hold.
  Result<Allocation> allocate(std::size_t bytes, cu::CUstream stream);
  // kInvalidArgument when `ptr` is not the start of a live block (a double free, a foreign
  // pointer). A block that other streams use becomes pending, and is reusable after `poll` found
  // their work done; where the driver refuses an event, `poll` asks again.
  Result<Freed> free(void* ptr);
  // The block is in use on `stream` too.
  Status record_stream(void* ptr, cu::CUstream stream);
  // Makes pending blocks reusable whose streams are done. `dead` receives the ranges that have no
  // live or pending block left by it.
  Status poll(std::vector<RangeId>* dead);
  // Returns ranges without live or pending blocks to the driver, longest unused first, until the
  // cached bytes are at most `keep_bytes`. `leaving` is asked of each before its addresses go, and
  // may say no.
  Status trim(std::size_t keep_bytes, const std::function<bool(RangeId)>& leaving);
  // Waits for the streams that pending blocks are in use on. `poll` makes them reusable then.
  Status wait_for_pending();
  bool any_pending() const { return !pending_.empty(); }

  // From now on large blocks lie where the layout says, as long as the program's steps go by it.
  // kBadState while blocks of an earlier layout are alive: it serves no more, so that a later try
  // finds it idle.
  Status install_layout(const std::vector<LayoutEntry>& entries, std::size_t bytes);
  // Gives an idle layout's range back to the driver.
  Status remove_layout();
  const Layout* layout() const { return layout_.get(); }  // null: there is none
  void retire_layout() {
    if (layout_) layout_->retire();
  }
  void step_ended() {
    if (layout_) layout_->step_ended();
  }

  Footprint footprint() const {
    return {static_cast<std::size_t>(tallies_.allocated_bytes[kAll].current), cached_bytes_,
            static_cast<std::size_t>(tallies_.allocations[kAll].current)};
  }
  Tallies& tallies() { return tallies_; }
  // The live block that starts at `ptr`.
  Block block_at(const void* ptr) const;
  // All ranges with their blocks, by address.
  std::vector<SegmentRow> describe() const;
  // What is told of every allocation, release and range; null: nobody.
  void set_listener(void (*listener)(const Event&)) { listener_ = listener; }

 private:
  struct Slot {  // what the arena knows of a range
    // A view is of the layout's range.
    enum class Kind : unsigned char { kNone, kLarge, kSegment, kView } kind = Kind::kNone;
    std::uint32_t pool = 0;
    std::uint32_t live = 0, pending = 0;   // blocks
    std::size_t bytes = 0, requested = 0;  // of the live or pending large block
    std::uint64_t emptied = 0;             // when the last block left; for trim's order
    RangeId next_cached = backing::kNoRange;
  };
  struct Pool {  // one a stream
    cu::CUstream stream = nullptr;
    SegmentPool small;
    std::unordered_map<std::size_t, RangeId> large;  // range bytes -> stack of cached ranges
  };
  struct Pending {
    RangeId range = backing::kNoRange;
    std::vector<cu::CUstream> streams;  // whose event is still to be recorded
    std::vector<cu::CUevent> events;
  };

  std::uint32_t pool_of(cu::CUstream stream);
  Result<RangeId> new_range(std::size_t bytes, Slot::Kind kind, std::uint32_t pool);
  void book_allocation(const Allocation& block, std::size_t requested);
  void book_inactive(const Allocation& block, bool taken);
  void tell(EventKind kind, std::uintptr_t address, std::size_t bytes, std::uint32_t pool) const;
  Result<Allocation> allocate_large(std::size_t bytes, std::uint32_t pool);
  Result<RangeId> cached_or_new(std::size_t bytes, std::uint32_t pool);
  Result<Allocation> allocate_small(std::size_t bytes, std::uint32_t pool);
  std::uint32_t unit_of(const void* ptr, RangeId range) const;    // of the segment
  std::size_t block_bytes(const void* ptr, RangeId range) const;  // 0: no live block starts there
  void reclaim(void* ptr, RangeId range);
  Status record_events(Pending& pending);
  Status finished(Pending& pending, bool& done);
  Status destroy(RangeId range);
  void unlink_cached(RangeId range);
  SegmentRow describe_layout() const;
  void book_layout(const LayoutStatus& layout, std::int64_t sign);

  const driver::Table& table_;
  backing::RangeTable& ranges_;
  driver::Place place_;
  std::vector<Slot> slots_;
  std::vector<std::unique_ptr<Pool>> pools_;
  std::unordered_map<void*, std::vector<cu::CUstream>> recorded_;
  std::unordered_map<void*, Pending> pending_;  // freed, and still in use on other streams
  std::vector<cu::CUevent> spare_events_;
  std::unique_ptr<Layout> layout_;
  Tallies tallies_;
  std::size_t cached_bytes_ = 0;
  std::uint32_t empty_segments_ = 0;
  void (*listener_)(const Event&) = nullptr;
  std::uint64_t clock_ = 0;
};

}  // namespace umem::arena
