// Reports of a framework's allocator: counters, a map of segments and blocks, events.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace umem::arena {

struct Stat {
  std::int64_t current = 0, peak = 0;
  std::int64_t allocated = 0, freed = 0;  // accumulated

  void add(std::int64_t n) {
    current += n;
    peak = std::max(peak, current);
    (n > 0 ? allocated : freed) += n > 0 ? n : -n;
  }
  void set(std::int64_t n) { add(n - current); }
};

enum StatType { kAll, kSmall, kLarge, kStatTypes };  // of which requests
using StatArray = std::array<Stat, kStatTypes>;

struct ArenaStats {
  StatArray allocations, segments, active, inactive_split;  // counts
  // Bytes: of live blocks; of ranges from the driver; of blocks that are live or still in use on a
  // stream; free bytes in segments that also have active ones; as requested.
  StatArray allocated_bytes, reserved_bytes, active_bytes, inactive_split_bytes, requested_bytes;
  std::int64_t retries = 0, ooms = 0, driver_allocs = 0, driver_frees = 0;
};

struct BlockRow {
  std::uintptr_t address = 0;
  std::size_t bytes = 0, requested = 0;
  bool allocated = false, active = false;
};
struct SegmentRow {
  std::uintptr_t base = 0;
  std::size_t bytes = 0;
  std::uintptr_t stream = 0;
  bool large = false;
  std::vector<BlockRow> blocks;
};

enum class EventKind : unsigned char {
  kAlloc,
  kFreeRequested,
  kFreeCompleted,
  kSegmentAlloc,
  kSegmentFree,
  kOutOfMemory,
};
struct Event {
  EventKind kind;
  int device;
  std::uintptr_t address;
  std::size_t bytes, requested;  // the same for a segment
  std::uintptr_t stream;
};
// Called with each event, from any thread, with a device's lock held: it must not call umem, and
// must not wait for long. It takes no lock. kOutOfMemory: `address` is 0, `bytes` is the requested
// size.
using Listener = void (*)(const Event& event);

}  // namespace umem::arena
