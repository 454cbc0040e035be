#include "arena/arena.h"

#include <algorithm>
#include <string>

#include "base/assert.h"
#include "base/thread_role.h"

namespace umem::arena {
namespace {

using driver::check;
using driver::Entry;
using managed::kNoRange;

// Below this, the small blocks of a pool are so few that a segment per group costs more than it
// helps.
constexpr std::uint32_t kFewSegments = 8;

constexpr std::size_t kMaxBytes = std::size_t{1} << 47;  // the user address space

void record(StatArray& stats, StatType which, std::int64_t n) {
  stats[kAll].add(n);
  stats[which].add(n);
}

StatType stat_type(bool large) {
  return large ? kLarge : kSmall;
}

}  // namespace

Arena::~Arena() {
  const driver::CallScope scope(table_, place_);
  for (const auto& [ptr, pending] : pending_)
    for (const auto& [event, context] : pending.events) table_.cuEventDestroy(event);
  for (const auto& [context, events] : spare_events_)
    for (cu::CUevent event : events) table_.cuEventDestroy(event);
}

std::uint32_t Arena::pool_of(cu::CUstream stream) {
  for (std::uint32_t i = 0; i < pools_.size(); ++i)
    if (pools_[i]->stream == stream) return i;
  pools_.push_back(std::make_unique<Pool>());
  pools_.back()->stream = stream;
  return static_cast<std::uint32_t>(pools_.size() - 1);
}

Result<RangeId> Arena::new_range(std::size_t bytes, Slot::Kind kind, std::uint32_t pool) {
  Result<RangeId> made = ranges_.create(bytes, place_);
  if (!made.ok()) return made;
  const RangeId id = made.value();
  if (slots_.size() <= id) slots_.resize(id + 1);
  slots_[id] = {};
  slots_[id].kind = kind;
  slots_[id].pool = pool;
  cached_bytes_ += bytes;
  const StatType type = stat_type(kind == Slot::Kind::kLarge);
  record(stats_.segments, type, 1);
  record(stats_.reserved_bytes, type, static_cast<std::int64_t>(bytes));
  ++stats_.driver_allocs;
  if (kind == Slot::Kind::kSegment) ++empty_segments_;
  notify(EventKind::kSegmentAlloc, ranges_[id].base, bytes, bytes, pool);
  return id;
}

Result<Allocation> Arena::allocate(std::size_t bytes, cu::CUstream stream, std::uint32_t group,
                                   const Admit& admit) {
  if (bytes > kMaxBytes)  // rounding it up could overflow
    return Status(Code::kOutOfHostMemory, "a block of " + std::to_string(bytes) +
                                              " bytes is larger than the address space");
  const std::uint32_t pool = pool_of(stream);
  Result<Allocation> result =
      bytes >= kLargeBytes ? allocate_large(bytes, pool) : allocate_small(bytes, pool, group);
  if (!result.ok()) return result;
  Allocation& block = result.value();
  Slot& slot = slots_[block.range];
  block.first_in_range = slot.live == 0 && slot.pending == 0;
  UMEM_ASSERT(block.first_in_range || !block.large, "a large block is alone in its range");
  ++slot.live;
  const std::size_t taken = block.large ? ranges_[block.range].bytes : block.bytes;
  UMEM_ASSERT(cached_bytes_ >= taken, "what is handed out was cached");
  cached_bytes_ -= taken;
  if (Status admitted = admit ? admit(block) : Status(); !admitted.ok()) {
    UMEM_ASSERT(slots_[block.range].live > 0, "a range counts its live blocks");
    --slots_[block.range].live;
    put_back(block.ptr, block.range, block.bytes);
    return admitted;
  }
  record_allocation(block, bytes);
  notify(EventKind::kAlloc, reinterpret_cast<std::uintptr_t>(block.ptr), block.bytes, bytes, pool);
  return result;
}

void Arena::record_allocation(const Allocation& block, std::size_t requested) {
  const StatType type = stat_type(block.large);
  const auto bytes = static_cast<std::int64_t>(block.bytes);
  record(stats_.allocations, type, 1);
  record(stats_.allocated_bytes, type, bytes);
  record(stats_.active, type, 1);
  record(stats_.active_bytes, type, bytes);
  record(stats_.requested_bytes, type, static_cast<std::int64_t>(requested));
  if (!block.large) record_inactive(block, true);
}

// A segment counts as split while part of it is active: its free part cannot be returned to the
// driver.
void Arena::record_inactive(const Allocation& block, bool taken) {
  const auto bytes = static_cast<std::int64_t>(block.bytes);
  const auto whole = block.first_in_range ? static_cast<std::int64_t>(kPageBytes) : 0;
  record(stats_.inactive_split_bytes, kSmall, taken ? whole - bytes : bytes - whole);
  if (block.first_in_range) empty_segments_ += taken ? -1u : 1u;
  std::int64_t free_blocks = 0;
  for (const auto& pool : pools_)
    for (const SegmentPool& small : pool->small) free_blocks += small.free_blocks();
  const std::int64_t split = free_blocks - empty_segments_;
  record(stats_.inactive_split, kSmall, split - stats_.inactive_split[kSmall].current);
}

void Arena::notify(EventKind kind, std::uintptr_t address, std::size_t bytes, std::size_t requested,
                   std::uint32_t pool) const {
  const auto listener = listener_ ? listener_->load(std::memory_order_relaxed) : nullptr;
  if (!listener) return;
  listener({kind, place_.device, address, bytes, requested,
            reinterpret_cast<std::uintptr_t>(pools_[pool]->stream)});
}

Result<RangeId> Arena::cached_or_new(std::size_t bytes, std::uint32_t pool) {
  const RangeId id = pools_[pool]->large[bytes];
  if (id == kNoRange) return new_range(bytes, Slot::Kind::kLarge, pool);
  UMEM_ASSERT(empty(id) && slots_[id].kind == Slot::Kind::kLarge,
              "the free list holds no live block");
  unlink_cached(id);
  return id;
}

Result<Allocation> Arena::allocate_large(std::size_t bytes, std::uint32_t pool) {
  RangeId id = kNoRange;
  // Memory allocated in a graph's capture is kept for its replays.
  if (layout_ && !helps_only() && !(place_.captures && *place_.captures > 0))
    id = layout_->take(align_up(bytes, kPageBytes), pools_[pool]->stream);
  if (id == kNoRange) {
    Result<RangeId> ordinary = cached_or_new(ranges_.bytes_for(bytes), pool);
    if (!ordinary.ok()) return ordinary.take_status();
    id = ordinary.value();
  }
  slots_[id].pool = pool;
  slots_[id].bytes = align_up(bytes, kPageBytes);
  slots_[id].requested = bytes;
  return Allocation{reinterpret_cast<void*>(ranges_[id].base), id, slots_[id].bytes, true, false};
}

std::size_t Arena::count_segments(const Pool& pool) const {
  std::size_t count = 0;
  for (const SegmentPool& small : pool.small) count += small.segments();
  return count;
}

Result<Allocation> Arena::allocate_small(std::size_t bytes, std::uint32_t pool,
                                         std::uint32_t group) {
  UMEM_ASSERT(group < kGroups, "the group is one of those that there are");
  if (count_segments(*pools_[pool]) < kFewSegments) group = 0;
  SegmentPool& small = pools_[pool]->small[group];
  const auto requested = static_cast<std::uint32_t>(bytes);
  SegmentPool::Block block = small.allocate(requested);
  if (block.segment == kNoRange) {
    Result<RangeId> made = new_range(kPageBytes, Slot::Kind::kSegment, pool);
    if (!made.ok()) return made.take_status();
    slots_[made.value()].group = group;
    small.add(made.value());
    block = small.allocate(requested);
  }
  const std::uintptr_t address = ranges_[block.segment].base + block.offset * kUnit;
  return Allocation{reinterpret_cast<void*>(address), block.segment, align_up(bytes, kUnit), false,
                    false};
}

std::uint32_t Arena::unit_of(const void* ptr, RangeId range) const {
  return static_cast<std::uint32_t>((reinterpret_cast<std::uintptr_t>(ptr) - ranges_[range].base) /
                                    kUnit);
}

std::size_t Arena::block_bytes(const void* ptr, RangeId range) const {
  if (range == kNoRange || range >= slots_.size()) return 0;
  const Slot& slot = slots_[range];
  const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(ptr) - ranges_[range].base;
  if (slot.kind == Slot::Kind::kLarge || slot.kind == Slot::Kind::kSubrange)
    return offset == 0 && slot.live > 0 ? slot.bytes : 0;
  if (slot.kind != Slot::Kind::kSegment || offset % kUnit != 0) return 0;
  if (!pending_.empty() && pending_.count(const_cast<void*>(ptr))) return 0;
  return segments_of(slot).units_at(range, unit_of(ptr, range)) * kUnit;
}

Block Arena::block_at(const void* ptr) const {
  const RangeId range = ranges_.find(ptr);
  const std::size_t bytes = block_bytes(ptr, range);
  if (bytes == 0) return {};
  const Slot& slot = slots_[range];
  if (slot.kind != Slot::Kind::kSegment) return {bytes, slot.requested, true};
  return {bytes, segments_of(slot).requested_at(range, unit_of(ptr, range)), false};
}

Result<Freed> Arena::free(void* ptr) {
  const RangeId range = ranges_.find(ptr);
  const auto [bytes, requested, large] = block_at(ptr);
  if (bytes == 0)
    return Status(Code::kInvalidArgument, "the pointer is not the start of a live block");
  Slot& slot = slots_[range];
  UMEM_ASSERT(slot.live > 0, "a range counts its live blocks");
  --slot.live;
  record(stats_.allocations, stat_type(large), -1);
  record(stats_.allocated_bytes, stat_type(large), -static_cast<std::int64_t>(bytes));
  notify(EventKind::kFreeRequested, reinterpret_cast<std::uintptr_t>(ptr), bytes, requested,
         slot.pool);
  if (!recorded_.empty()) {
    if (auto found = recorded_.find(ptr); found != recorded_.end()) {
      ++slot.pending;
      Pending& pending = pending_[ptr];
      pending = {range, std::move(found->second), {}};
      recorded_.erase(found);
      const driver::CallScope scope(table_, place_);
      const Status recorded = record_events(pending);
      (void)recorded;  // the block is free nevertheless; poll retries and reports
      return Freed{range, bytes, false};
    }
  }
  reclaim(ptr, range);
  return Freed{range, bytes, slot.live == 0 && slot.pending == 0};
}

// The block's bytes may be handed out again.
void Arena::reclaim(void* ptr, RangeId range) {
  Slot& slot = slots_[range];
  const bool large = slot.kind != Slot::Kind::kSegment;
  const std::uint32_t offset = unit_of(ptr, range);
  const SegmentPool& small = segments_of(slot);
  const std::size_t bytes = large ? slot.bytes : small.units_at(range, offset) * kUnit;
  const std::size_t requested = large ? slot.requested : small.requested_at(range, offset);
  const bool emptied = slot.live == 0 && slot.pending == 0;
  record(stats_.active, stat_type(large), -1);
  record(stats_.active_bytes, stat_type(large), -static_cast<std::int64_t>(bytes));
  record(stats_.requested_bytes, stat_type(large), -static_cast<std::int64_t>(requested));
  notify(EventKind::kFreeCompleted, reinterpret_cast<std::uintptr_t>(ptr), bytes, requested,
         slot.pool);
  put_back(ptr, range, bytes);
  if (!large) record_inactive({ptr, range, bytes, false, emptied}, false);
}

// Into the free list that it came from.
void Arena::put_back(void* ptr, RangeId range, std::size_t bytes) {
  Slot& slot = slots_[range];
  if (empty(range)) slot.emptied = ++clock_;
  cached_bytes_ += slot.kind == Slot::Kind::kLarge ? ranges_[range].bytes : bytes;
  switch (slot.kind) {
    case Slot::Kind::kLarge:
      return link_cached(range);
    case Slot::Kind::kSegment:
      return segments_of(slot).free(range, unit_of(ptr, range));
    case Slot::Kind::kSubrange:
      UMEM_ASSERT(layout_ != nullptr, "a layout outlives the blocks in it");
      return layout_->give_back(range);
    case Slot::Kind::kNone:
      UMEM_ASSERT(false, "a block is in a range");
  }
}

Status Arena::record_stream(void* ptr, cu::CUstream stream) {
  const RangeId range = ranges_.find(ptr);
  if (block_bytes(ptr, range) == 0)
    return {Code::kInvalidArgument, "the pointer is not the start of a live block"};
  if (pools_[slots_[range].pool]->stream == stream) return {};  // ordered anyway
  std::vector<cu::CUstream>& streams = recorded_[ptr];
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  return {};
}

// A stream is removed from the list only after its event is recorded, so a block without its event
// stays out of use until a later poll records it. A later event waits for more than needed, never
// for less.
Status Arena::record_events(Pending& pending) {
  while (!pending.streams.empty()) {
    const cu::CUstream stream = pending.streams.back();
    // An event and its stream are of one device, which may be another one than the block's.
    driver::Place there = place_;
    cu::CUcontext context = nullptr;
    if (place_.context && table_.cuStreamGetCtx(stream, &context) == cu::CUDA_SUCCESS)
      there.context = context;
    const driver::CallScope scope(table_, there);
    // An event recorded now would belong to the graph: a later poll records it.
    if (driver::capturing(table_, there, stream)) return {};
    std::vector<cu::CUevent>& spare = spare_events_[there.context];
    if (spare.empty()) {
      cu::CUevent event = nullptr;
      UMEM_RETURN_IF_ERROR(
          check(table_.cuEventCreate(&event, cu::CU_EVENT_DISABLE_TIMING), Entry::cuEventCreate));
      spare.push_back(event);
    }
    UMEM_RETURN_IF_ERROR(check(table_.cuEventRecord(spare.back(), stream), Entry::cuEventRecord));
    pending.events.push_back({spare.back(), there.context});
    spare.pop_back();
    pending.streams.pop_back();
  }
  return {};
}

Status Arena::finished(Pending& pending, bool& done) {
  UMEM_RETURN_IF_ERROR(record_events(pending));
  if (!pending.streams.empty()) return {};
  while (!pending.events.empty()) {
    const auto [event, context] = pending.events.back();
    const cu::CUresult result = table_.cuEventQuery(event);
    if (result == cu::CUDA_ERROR_NOT_READY) return {};
    UMEM_RETURN_IF_ERROR(check(result, Entry::cuEventQuery));
    spare_events_[context].push_back(event);
    pending.events.pop_back();
  }
  done = true;
  return {};
}

Status Arena::pending_events(std::vector<cu::CUevent>& events) {
  const driver::CallScope scope(table_, place_);
  for (auto& [ptr, pending] : pending_) {
    UMEM_RETURN_IF_ERROR(record_events(pending));
    for (const auto& [event, context] : pending.events) events.push_back(event);
  }
  return {};
}

Status Arena::poll(std::vector<RangeId>* dead) {
  if (pending_.empty()) return {};
  const driver::CallScope scope(table_, place_);
  Status first;
  for (auto it = pending_.begin(); it != pending_.end();) {
    bool done = false;
    Status status = finished(it->second, done);
    if (!status.ok() && first.ok()) first = std::move(status);
    if (!done) {
      ++it;
      continue;
    }
    void* ptr = it->first;
    const RangeId range = it->second.range;
    it = pending_.erase(it);
    Slot& slot = slots_[range];
    UMEM_ASSERT(slot.pending > 0, "a range counts its pending blocks");
    --slot.pending;
    reclaim(ptr, range);
    if (slot.live == 0 && slot.pending == 0 && dead) dead->push_back(range);
  }
  return first;
}

void Arena::link_cached(RangeId range) {
  RangeId& top = pools_[slots_[range].pool]->large[ranges_[range].bytes];
  slots_[range].next_cached = top;
  if (top != kNoRange) slots_[top].previous_cached = range;
  top = range;
}

void Arena::unlink_cached(RangeId range) {
  Slot& slot = slots_[range];
  RangeId& link = slot.previous_cached != kNoRange ? slots_[slot.previous_cached].next_cached
                                                   : pools_[slot.pool]->large[ranges_[range].bytes];
  UMEM_ASSERT(link == range, "an empty large range is in its free list");
  link = slot.next_cached;
  if (link != kNoRange) slots_[link].previous_cached = slot.previous_cached;
  slot.next_cached = slot.previous_cached = kNoRange;
}

void Arena::step_ended() {
  step_ends_ = {step_ends_[1], step_ends_[2], clock_};
  if (layout_) layout_->step_ended();
  for (const auto& pool : pools_)
    for (SegmentPool& small : pool->small) small.step_ended();
}

Status Arena::destroy(RangeId range) {
  UMEM_ASSERT(empty(range), "only a range without blocks goes back to the driver");
  const std::size_t bytes = ranges_[range].bytes;
  const std::uintptr_t base = ranges_[range].base;
  UMEM_RETURN_IF_ERROR(ranges_.destroy(range, place_, freer_));
  cached_bytes_ -= bytes;
  const bool large = slots_[range].kind == Slot::Kind::kLarge;
  record(stats_.segments, stat_type(large), -1);
  record(stats_.reserved_bytes, stat_type(large), -static_cast<std::int64_t>(bytes));
  ++stats_.driver_frees;
  if (!large) --empty_segments_;
  notify(EventKind::kSegmentFree, base, bytes, bytes, slots_[range].pool);
  slots_[range] = {};
  return {};
}

Status Arena::trim(std::size_t keep_bytes, const std::function<bool(RangeId)>& leaving, bool idle) {
  std::vector<RangeId> empty;
  for (RangeId id = 1; id < slots_.size(); ++id)
    if ((slots_[id].kind == Slot::Kind::kLarge || slots_[id].kind == Slot::Kind::kSegment) &&
        slots_[id].live == 0 && slots_[id].pending == 0 &&
        (!idle || slots_[id].emptied <= step_ends_.front()))
      empty.push_back(id);
  std::sort(empty.begin(), empty.end(),
            [&](RangeId a, RangeId b) { return slots_[a].emptied < slots_[b].emptied; });
  for (RangeId id : empty) {
    if (cached_bytes_ <= keep_bytes) break;
    if (leaving && !leaving(id)) continue;
    const bool large = slots_[id].kind == Slot::Kind::kLarge;
    if (large)
      unlink_cached(id);
    else
      segments_of(slots_[id]).remove(id);
    if (Status status = destroy(id); !status.ok()) {
      // The driver did not take it: back into the cache.
      if (large)
        link_cached(id);
      else
        segments_of(slots_[id]).add(id);
      return status;
    }
  }
  return {};
}

}  // namespace umem::arena
