// The arena's map: its ranges with their blocks, and the one range that a layout has.
#include <algorithm>
#include <utility>

#include "arena/arena.h"
#include "base/assert.h"

namespace umem::arena {

Status Arena::install_layout(const std::vector<LayoutEntry>& entries, std::size_t bytes) {
  if (layout_) {
    layout_->retire();
    return {Code::kBadState, "blocks of an earlier layout are alive; try again after a step"};
  }
  Result<std::unique_ptr<Layout>> made = Layout::make(ranges_, place_, entries, bytes);
  if (!made.ok()) return made.take_status();
  layout_ = std::move(made.value());
  for (RangeId subrange : layout_->subranges()) {
    if (slots_.size() <= subrange) slots_.resize(subrange + 1);
    slots_[subrange] = {};
    slots_[subrange].kind = Slot::Kind::kSubrange;
  }
  record_layout(layout_->status(), 1);
  return {};
}

Status Arena::remove_layout() {
  const LayoutStatus before = layout_->status();
  UMEM_RETURN_IF_ERROR(layout_->destroy(place_, freer_));
  record_layout(before, -1);
  for (RangeId subrange : layout_->subranges()) slots_[subrange] = {};
  layout_.reset();
  return {};
}

// The layout's range was allocated, or freed.
void Arena::record_layout(const LayoutStatus& layout, std::int64_t sign) {
  const auto bytes = static_cast<std::int64_t>(layout.bytes);
  cached_bytes_ = static_cast<std::size_t>(static_cast<std::int64_t>(cached_bytes_) + sign * bytes);
  for (StatType type : {kAll, kLarge}) {
    stats_.segments[type].add(sign);
    stats_.reserved_bytes[type].add(sign * bytes);
  }
  ++(sign > 0 ? stats_.driver_allocs : stats_.driver_frees);
  notify(sign > 0 ? EventKind::kSegmentAlloc : EventKind::kSegmentFree, layout.base, layout.bytes,
         layout.bytes, pool_of(layout.stream));
}

// One segment: its live blocks and the free parts between them.
SegmentRow Arena::describe_layout() const {
  const LayoutStatus layout = layout_->status();
  SegmentRow row{
      layout.base, layout.bytes, reinterpret_cast<std::uintptr_t>(layout.stream), true, {}};
  std::vector<BlockRow> live;
  for (RangeId subrange : layout_->subranges())
    if (const Slot& slot = slots_[subrange]; slot.live + slot.pending > 0)
      live.push_back({ranges_[subrange].base, slot.bytes, slot.requested, true, true});
  std::sort(live.begin(), live.end(),
            [](const BlockRow& a, const BlockRow& b) { return a.address < b.address; });
  std::uintptr_t at = layout.base;
  const auto free_until = [&](std::uintptr_t end) {
    if (at < end) row.blocks.push_back({at, end - at, 0, false, false});
  };
  for (const BlockRow& block : live) {
    free_until(block.address);
    row.blocks.push_back(block);
    at = block.address + block.bytes;
  }
  free_until(layout.base + layout.bytes);
  return row;
}

std::vector<SegmentRow> Arena::describe() const {
  std::vector<SegmentRow> rows;
  if (layout_) rows.push_back(describe_layout());
  for (RangeId id = 1; id < slots_.size(); ++id) {
    const Slot& slot = slots_[id];
    if (slot.kind == Slot::Kind::kNone || slot.kind == Slot::Kind::kSubrange) continue;
    const bool large = slot.kind == Slot::Kind::kLarge;
    const managed::Range& range = ranges_[id];
    rows.push_back({range.base,
                    range.bytes,
                    reinterpret_cast<std::uintptr_t>(pools_[slot.pool]->stream),
                    large,
                    {}});
    std::vector<BlockRow>& blocks = rows.back().blocks;
    if (!large) {
      segments_of(slot).describe(id, range.base, blocks);
      continue;
    }
    const std::size_t used = slot.live + slot.pending > 0 ? slot.bytes : 0;
    if (used > 0) blocks.push_back({range.base, used, slot.requested, true, true});
    if (used < range.bytes)
      blocks.push_back({range.base + used, range.bytes - used, 0, false, false});
  }
  for (SegmentRow& row : rows)
    for (BlockRow& block : row.blocks)
      if (block.active && pending_.count(reinterpret_cast<void*>(block.address)))
        block.allocated = false;
  std::sort(rows.begin(), rows.end(),
            [](const SegmentRow& a, const SegmentRow& b) { return a.base < b.base; });
  return rows;
}

void Arena::check_invariants() const {
  if constexpr (!kAsserts) return;
  std::size_t cached = layout_ ? layout_->status().bytes : 0, listed = 0;
  for (const auto& pool : pools_) {
    for (const auto& [bytes, first] : pool->large)
      for (RangeId id = first; id != managed::kNoRange; id = slots_[id].next_cached, ++listed) {
        UMEM_ASSERT(empty(id) && slots_[id].kind == Slot::Kind::kLarge,
                    "the free list holds no live block");
        UMEM_ASSERT(ranges_[id].bytes == bytes, "a free list has ranges of one size");
        UMEM_ASSERT(listed < slots_.size(), "a free list has each range once");
      }
    for (const SegmentPool& small : pool->small) cached += small.check_invariants() * kUnit;
  }
  for (RangeId id = 1; id < slots_.size(); ++id) {
    const Slot& slot = slots_[id];
    if (slot.kind == Slot::Kind::kSubrange && !empty(id)) cached -= slot.bytes;
    if (slot.kind != Slot::Kind::kLarge || !empty(id)) continue;
    cached += ranges_[id].bytes;
    --listed;
  }
  UMEM_ASSERT(listed == 0, "every empty large range is in a free list");
  UMEM_ASSERT(cached == cached_bytes_, "cached bytes are the sum of what is free");
}

}  // namespace umem::arena
