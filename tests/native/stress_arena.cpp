// The arena alone, over a driver table of this program's own whose events complete late: random
// sequences of allocate, free, record_stream, poll and trim, with the invariants checked
// throughout.
#include <sys/mman.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "arena/arena.h"
#include "expect.h"

namespace {

using namespace umem;  // NOLINT: a test program
using arena::Allocation;
using arena::Arena;
using managed::RangeId;

// The driver: address space from mmap, and events that complete on the test's command.
std::map<std::uintptr_t, std::size_t> g_ranges;
std::set<cu::CUevent> g_events, g_waiting;
bool g_refuse_memory = false, g_refuse_create = false, g_refuse_record = false;

cu::CUresult alloc_managed(cu::CUdeviceptr* ptr, std::size_t bytes, unsigned) {
  if (g_refuse_memory || bytes > std::size_t{1} << 47) return cu::CUDA_ERROR_OUT_OF_MEMORY;
  void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *ptr = reinterpret_cast<std::uintptr_t>(memory);
  g_ranges[*ptr] = bytes;
  return cu::CUDA_SUCCESS;
}
cu::CUresult free_memory(cu::CUdeviceptr ptr) {
  const auto found = g_ranges.find(ptr);
  if (found == g_ranges.end()) return cu::CUDA_ERROR_INVALID_VALUE;
  munmap(reinterpret_cast<void*>(found->first), found->second);
  g_ranges.erase(found);
  return cu::CUDA_SUCCESS;
}
cu::CUresult create_event(cu::CUevent* event, unsigned) {
  static std::uintptr_t next = 0x100;
  if (g_refuse_create) return cu::CUDA_ERROR_UNKNOWN;
  *event = reinterpret_cast<cu::CUevent>(next += 0x10);
  g_events.insert(*event);
  return cu::CUDA_SUCCESS;
}
cu::CUresult destroy_event(cu::CUevent event) {
  return g_events.erase(event) ? cu::CUDA_SUCCESS : cu::CUDA_ERROR_INVALID_HANDLE;
}
cu::CUresult record_event(cu::CUevent event, cu::CUstream) {
  if (g_refuse_record) return cu::CUDA_ERROR_UNKNOWN;
  g_waiting.insert(event);
  return cu::CUDA_SUCCESS;
}
cu::CUresult query_event(cu::CUevent event) {
  if (!g_events.count(event)) return cu::CUDA_ERROR_INVALID_HANDLE;
  return g_waiting.count(event) ? cu::CUDA_ERROR_NOT_READY : cu::CUDA_SUCCESS;
}

driver::Table make_table() {
  driver::Table table;
  table.cuMemAllocManaged = alloc_managed;
  table.cuMemFree = free_memory;
  table.cuEventCreate = create_event;
  table.cuEventDestroy = destroy_event;
  table.cuEventRecord = record_event;
  table.cuEventQuery = query_event;
  driver::fill_missing(table);
  return table;
}

cu::CUstream stream(std::uintptr_t n) {
  return reinterpret_cast<cu::CUstream>(n);
}

// Memory that must not be allocated: live blocks, and freed ones that another stream still uses.
class Taken {
 public:
  void add(const void* ptr, std::size_t bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(ptr);
    const auto after = spans_.upper_bound(begin);
    EXPECT(after == spans_.end() || begin + bytes <= after->first);
    if (after != spans_.begin()) {
      const auto before = std::prev(after);
      EXPECT(before->first + before->second <= begin);
    }
    spans_[begin] = bytes;
  }
  void remove(const void* ptr) { spans_.erase(reinterpret_cast<std::uintptr_t>(ptr)); }
  void remove_in(std::uintptr_t base, std::size_t bytes) {
    spans_.erase(spans_.lower_bound(base), spans_.lower_bound(base + bytes));
  }

 private:
  std::map<std::uintptr_t, std::size_t> spans_;
};

std::size_t random_bytes(std::mt19937& random) {
  switch (random() % 4) {
    case 0:
      return 1 + random() % 600;
    case 1:
      return 1 + random() % (64 * KiB);
    case 2:
      return 1 + random() % (2 * MiB);
    default:
      return 2 * MiB + random() % (40 * MiB);
  }
}

struct Live {
  Allocation block;
  std::set<std::uintptr_t> other_streams;
};

// The stats and the map of blocks agree.
void expect_consistent(Arena& arena) {
  arena.check_invariants();
  const arena::ArenaStats& stats = arena.stats();
  std::size_t reserved = 0, allocated = 0, active = 0, requested = 0, split = 0;
  for (const arena::SegmentRow& segment : arena.describe()) {
    reserved += segment.bytes;
    std::uintptr_t at = segment.base;
    std::size_t in_use = 0;
    for (const arena::BlockRow& block : segment.blocks) {
      EXPECT(block.address == at);
      EXPECT(block.active || !block.allocated);
      at += block.bytes;
      in_use += block.active ? block.bytes : 0;
      allocated += block.allocated ? block.bytes : 0;
      requested += block.active ? block.requested : 0;
    }
    EXPECT(at == segment.base + segment.bytes);
    active += in_use;
    if (!segment.large && in_use > 0) split += segment.bytes - in_use;
  }
  const auto current = [](const arena::StatArray& stats) {
    EXPECT(stats[arena::kSmall].current + stats[arena::kLarge].current ==
           stats[arena::kAll].current);
    EXPECT(stats[arena::kAll].allocated - stats[arena::kAll].freed == stats[arena::kAll].current);
    return static_cast<std::size_t>(stats[arena::kAll].current);
  };
  EXPECT(current(stats.reserved_bytes) == reserved);
  EXPECT(current(stats.allocated_bytes) == allocated);
  EXPECT(current(stats.active_bytes) == active);
  EXPECT(current(stats.requested_bytes) == requested);
  EXPECT(current(stats.inactive_split_bytes) == split);
}

// Installs a random layout, regardless of present blocks, or returns an idle one.
void change_layout(Arena& arena, std::mt19937& random) {
  if (arena.layout() && arena.layout()->idle()) EXPECT(arena.remove_layout().ok());
  std::vector<arena::LayoutEntry> entries;
  for (int i = 0; i < 12; ++i) {
    const std::size_t offset = random() % 6 ? random() % 40 * kPageBytes : arena::kNoPlace;
    entries.push_back({(1 + random() % 21) * kPageBytes, offset});
  }
  const bool had = arena.layout() != nullptr;
  EXPECT(arena.install_layout(entries, 64 * kPageBytes).ok() == !had);
  EXPECT(!arena.install_layout({{kPageBytes, 64 * kPageBytes}}, 64 * kPageBytes).ok());
}

void random_sequence(unsigned seed, int steps) {
  const driver::Table table = make_table();
  managed::RangeTable ranges(table);
  std::size_t live_bytes = 0;
  {
    Arena arena(table, ranges, {});
    std::mt19937 random(seed);
    std::vector<Live> live;
    std::map<void*, RangeId> pending;
    Taken taken;
    for (int step = 0; step < steps; ++step) {
      if (random() % 5 == 0) arena.step_ended();
      if (random() % 40 == 0) change_layout(arena, random);
      const unsigned action = random() % 10;
      if (action < 5 || live.empty()) {
        const std::size_t bytes = random_bytes(random);
        Result<Allocation> made =
            arena.allocate(bytes, stream(random() % 2), random() % arena::kGroups);
        EXPECT(made.ok());
        const Allocation& block = made.value();
        EXPECT(block.bytes >= bytes);
        EXPECT(block.large == (bytes >= arena::kLargeBytes));
        EXPECT(reinterpret_cast<std::uintptr_t>(block.ptr) % arena::kUnit == 0);
        EXPECT(ranges.find(block.ptr) == block.range);
        taken.add(block.ptr, block.bytes);
        live_bytes += block.bytes;
        live.push_back({block, {}});
      } else if (action < 8) {
        std::swap(live[random() % live.size()], live.back());
        const Live gone = live.back();
        live.pop_back();
        Result<arena::Freed> freed = arena.free(gone.block.ptr);
        EXPECT(freed.ok() && freed.value().bytes == gone.block.bytes);
        EXPECT(!arena.free(gone.block.ptr).ok());  // twice
        live_bytes -= gone.block.bytes;
        if (gone.other_streams.empty()) {
          taken.remove(gone.block.ptr);
        } else {
          pending[gone.block.ptr] = gone.block.range;
        }
      } else if (action == 8) {
        Live& used = live[random() % live.size()];
        const std::uintptr_t other = 2 + random() % 3;
        EXPECT(arena.record_stream(used.block.ptr, stream(other)).ok());
        used.other_streams.insert(other);
      } else if (random() % 2) {
        g_waiting.clear();  // all streams are done
        std::vector<RangeId> dead;
        EXPECT(arena.poll(&dead).ok());
        for (const auto& [ptr, range] : pending) taken.remove(ptr);
        pending.clear();
      } else {
        const auto leaving = [&](RangeId id) {
          EXPECT(ranges[id].bytes > 0);
          return random() % 4 > 0;
        };
        EXPECT(arena.trim(random() % (64 * MiB), leaving).ok());
        for (const Live& kept : live) EXPECT(ranges.find(kept.block.ptr) == kept.block.range);
      }
      EXPECT(arena.footprint().live_bytes == live_bytes);
      EXPECT(arena.footprint().live_blocks == live.size());
      if (step % 64 == 0) expect_consistent(arena);
    }
    for (const Live& rest : live) {
      EXPECT(arena.free(rest.block.ptr).ok());
      live_bytes -= rest.block.bytes;
    }
    g_waiting.clear();
    EXPECT(arena.poll(nullptr).ok());
    // Free neighbours were merged: every segment is one chunk again, and can be released.
    if (arena.layout()) EXPECT(arena.remove_layout().ok());
    EXPECT(arena.trim(0, nullptr).ok());
    EXPECT(arena.footprint().cached_bytes == 0 && arena.footprint().live_bytes == 0);
  }
  EXPECT(g_ranges.empty() && g_events.empty() && ranges.total_bytes() == 0);
}

void pending_blocks_are_not_reused() {
  const driver::Table table = make_table();
  managed::RangeTable ranges(table);
  Arena arena(table, ranges, {});
  const Allocation a = arena.allocate(4 * MiB, stream(0)).value();
  EXPECT(arena.record_stream(a.ptr, stream(5)).ok());
  Result<arena::Freed> freed = arena.free(a.ptr);
  EXPECT(freed.ok() && !freed.value().last_in_range);
  const Allocation b = arena.allocate(4 * MiB, stream(0)).value();
  EXPECT(b.ptr != a.ptr);
  std::vector<RangeId> dead;
  EXPECT(arena.poll(&dead).ok() && dead.empty());
  g_waiting.clear();
  EXPECT(arena.poll(&dead).ok() && dead == std::vector<RangeId>{a.range});
  EXPECT(arena.allocate(4 * MiB, stream(0)).value().ptr == a.ptr);
  EXPECT(arena.allocate(4 * MiB, stream(1)).value().ptr != a.ptr);
}

// A block that another stream uses waits for it even while the driver refuses events.
void refused_events(bool& refuse, std::size_t bytes) {
  const driver::Table table = make_table();
  managed::RangeTable ranges(table);
  {
    Arena arena(table, ranges, {});
    const Allocation a = arena.allocate(bytes, stream(0)).value();
    EXPECT(arena.record_stream(a.ptr, stream(5)).ok());
    refuse = true;
    EXPECT(arena.free(a.ptr).ok());  // the caller's part is done
    EXPECT(!arena.free(a.ptr).ok());
    EXPECT(!arena.poll(nullptr).ok());
    EXPECT(arena.allocate(bytes, stream(0)).value().ptr != a.ptr);
    refuse = false;
    EXPECT(arena.poll(nullptr).ok());  // the event is recorded now, and not complete
    EXPECT(arena.allocate(bytes, stream(0)).value().ptr != a.ptr);
    g_waiting.clear();
    std::vector<RangeId> dead;
    EXPECT(arena.poll(&dead).ok());
    EXPECT(arena.allocate(bytes, stream(0)).value().ptr == a.ptr);
    // An arena destroyed while a block waits returns the event too.
    EXPECT(arena.record_stream(a.ptr, stream(5)).ok());
    EXPECT(arena.free(a.ptr).ok());
  }
  g_waiting.clear();
  EXPECT(g_events.empty());
  g_events.clear();
  g_ranges.clear();
}

// No rounding on the way turns a request that cannot be met into another one.
void huge_requests() {
  const driver::Table table = make_table();
  managed::RangeTable ranges(table);
  Arena arena(table, ranges, {});
  for (const std::size_t bytes : {~std::size_t{0}, ~std::size_t{0} - 4 * MiB, std::size_t{1} << 60,
                                  (std::size_t{1} << 47) + 1}) {
    Result<Allocation> made = arena.allocate(bytes, stream(0));
    EXPECT(!made.ok());
    const Code code = made.take_status().code();
    EXPECT(code == Code::kOutOfHostMemory || code == Code::kOutOfDeviceMemory);
  }
  EXPECT(g_ranges.empty());
}

// The placement of small blocks depends on live blocks, not on the order of releases; a segment
// that is nearly full at a step's end takes no more; groups share none once there are some
// segments.
void small_blocks() {
  const driver::Table table = make_table();
  managed::RangeTable ranges(table);
  Arena arena(table, ranges, {});
  std::vector<Allocation> blocks;
  const auto take = [&](std::size_t bytes, std::uint32_t group = 0) {
    return arena.allocate(bytes, stream(0), group).value();
  };
  for (int i = 0; i < 8; ++i) blocks.push_back(take(256 * KiB));  // one segment
  const auto free = [&](int i) {
    EXPECT(arena.free(blocks[static_cast<std::size_t>(i)].ptr).ok());
  };
  for (const auto& order : {std::array{1, 4, 6}, std::array{6, 1, 4}, std::array{4, 6, 1}}) {
    for (const int i : order) free(i);
    for (const int i : {1, 4, 6})
      EXPECT(take(256 * KiB).ptr == blocks[static_cast<std::size_t>(i)].ptr);
  }
  free(3);
  arena.step_ended();  // an eighth is free
  const Allocation other = take(256 * KiB);
  EXPECT(other.range != blocks[0].range);
  for (const int i : {0, 1}) free(i);  // now it is not nearly full any more
  EXPECT(take(1000).range == blocks[0].range);
  arena.check_invariants();

  EXPECT(take(1000, 1).range == blocks[0].range);  // few segments
  for (int i = 0; i < 8; ++i) take(1 * MiB + 512 * KiB);
  const RangeId backward = take(1000, 1).range;
  EXPECT(backward != take(1000).range && backward == take(1000, 1).range);
  EXPECT(take(1000, 2).range != backward);
  arena.check_invariants();
}

void refusals() {
  const driver::Table table = make_table();
  managed::RangeTable ranges(table);
  Arena arena(table, ranges, {});
  int foreign = 0;
  EXPECT(arena.free(&foreign).take_status().code() == Code::kInvalidArgument);
  const Allocation small = arena.allocate(1000, stream(0)).value();
  EXPECT(!arena.free(static_cast<char*>(small.ptr) + arena::kUnit).ok());
  EXPECT(!arena.record_stream(&foreign, stream(1)).ok());
  g_refuse_memory = true;
  EXPECT(arena.allocate(8 * MiB, stream(0)).take_status().code() == Code::kOutOfDeviceMemory);
  EXPECT(arena.allocate(1000, stream(0)).ok());  // still fits the segment
  g_refuse_memory = false;
}

// A block that is refused counts nowhere, and its bytes serve the next request.
void refused_blocks() {
  const driver::Table table = make_table();
  managed::RangeTable ranges(table);
  Arena arena(table, ranges, {});
  const auto refuse = [](const Allocation&) { return Status(Code::kOutOfHostMemory, "no room"); };
  for (const std::size_t bytes : {std::size_t{1000}, 4 * MiB}) {
    const arena::ArenaStats before = arena.stats();
    const Result<Allocation> refused = arena.allocate(bytes, stream(0), 0, refuse);
    EXPECT(refused.code() == Code::kOutOfHostMemory);
    const arena::ArenaStats& now = arena.stats();
    for (const auto& [then, after] : {std::pair{before.allocations, now.allocations},
                                      std::pair{before.allocated_bytes, now.allocated_bytes},
                                      std::pair{before.active_bytes, now.active_bytes},
                                      std::pair{before.inactive_split, now.inactive_split}})
      EXPECT(after[arena::kAll].peak == then[arena::kAll].peak &&
             after[arena::kAll].allocated == then[arena::kAll].allocated);
    EXPECT(arena.footprint().cached_bytes ==
           static_cast<std::size_t>(now.reserved_bytes[arena::kAll].current));
    arena.check_invariants();
    const auto made = now.driver_allocs;
    const Allocation block = arena.allocate(bytes, stream(0)).value();
    EXPECT(block.first_in_range && now.driver_allocs == made);
    EXPECT(arena.free(block.ptr).ok());
    EXPECT(arena.trim(0, {}).ok());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 3000;
  for (unsigned seed = 0; seed < 20; ++seed) random_sequence(seed, steps);
  pending_blocks_are_not_reused();
  g_ranges.clear();
  g_events.clear();
  for (const std::size_t bytes : {std::size_t{1000}, 4 * MiB}) {
    refused_events(g_refuse_create, bytes);
    refused_events(g_refuse_record, bytes);
  }
  huge_requests();
  small_blocks();
  g_ranges.clear();
  refusals();
  refused_blocks();
  std::printf("%s: %d wrong\n", g_wrong ? "FAILED" : "ok", g_wrong.load());
  return g_wrong ? 1 : 0;
}
