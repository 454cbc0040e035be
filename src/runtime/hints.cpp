#include "runtime/hints.h"

#include <algorithm>
#include <vector>

#include "runtime/each_unit.h"
#include "runtime/spans.h"

namespace umem::runtime {
namespace {

using engine::Engine;
using managed::MemSpan;
using managed::RangeId;

std::uintptr_t end_of(const MemSpan& span) {
  return span.base + span.bytes;
}

// Extends the span by the padding after a large block, which belongs to no other block.
MemSpan with_padding(const State& s, const HeldDevices& held, MemSpan span) {
  const RangeId id = s.ranges.find(reinterpret_cast<const void*>(end_of(span) - 1));
  const RangeId head = s.ranges[id].pieces > 0 ? id : s.ranges[id].head;
  const std::uintptr_t base = s.ranges[head].base;
  const arena::Block block = held.of(head)->arena.block_at(reinterpret_cast<const void*>(base));
  if (block.large && end_of(span) >= base + block.requested)
    span.bytes = base + block.bytes - span.base;
  return span;
}

MemSpan whole_pages(MemSpan span) {
  const std::uintptr_t first = align_up(span.base, kPageBytes);
  const std::uintptr_t last = align_down(end_of(span), kPageBytes);
  return {first, last > first ? last - first : 0};
}

void add(Placement& sum, Engine& engine, RangeId id, std::size_t bytes) {
  const residency::Unit& unit = engine.ledger().at(id);
  sum.bytes += bytes;
  if (unit.state == residency::State::kDevice) {
    sum.resident += bytes;
    if (engine.hints().arriving(id)) sum.arriving += bytes;
  } else if (unit.state == residency::State::kHost) {
    sum.evicted += bytes;
    if (engine.hints().leaving(id)) sum.leaving += bytes;
  } else {
    (unit.discarded ? sum.discarded : sum.unknown) += bytes;
  }
  sum.pins = std::max(sum.pins, unit.user_pins);
  sum.exempt = sum.exempt || unit.exempt > 0 || engine.ledger().exempted(unit);
  sum.in_use = sum.in_use || unit.op_pins > 0;
  sum.tag = residency::name(unit.tag);
  sum.family = residency::name(unit.family);
}

Placement look(const State& s, const HeldDevices& held, MemSpan span) {
  Placement sum;
  std::uint32_t scope = 0;
  each_unit(s, held, span, [&](Device& device, RangeId id, MemSpan part) {
    add(sum, device.engine, id, part.bytes);
    // A view of a large block has the block's scope.
    const bool segment = device.engine.ledger().at(id).segment;
    const std::uintptr_t block = segment ? span.base : s.ranges[s.ranges[id].head].base;
    const auto found = device.scopes.find(reinterpret_cast<const void*>(block));
    if (found != device.scopes.end()) scope = found->second;
  });
  sum.scope = s.scope_names.name(scope);
  return sum;
}

// Calls `act` with the engine and the id of each unit, as long as it returns ok.
template <class Act>
Status until_one_fails(const State& s, const HeldDevices& held, const MemSpans& spans, Act act) {
  Status status;
  for (const MemSpan& span : spans)
    each_unit(s, held, span, [&](Device& device, RangeId id, MemSpan) {
      if (status.ok()) status = act(device.engine, id);
    });
  return status;
}

Status check_evictable(const State& s, const HeldDevices& held, const MemSpans& spans) {
  return until_one_fails(s, held, spans, [](const Engine& engine, RangeId id) {
    return engine.hints().check_evictable(id);
  });
}

}  // namespace

std::string set_scope(const std::string& name) {
  return state().scope_names.enter(name);
}

Status prefetch(const MemSpans& spans) {
  State& s = state();
  const HeldDevices held(s, devices_of(s, spans));
  UMEM_RETURN_IF_ERROR(check_spans(s, held, spans));
  return bring_in(s, held, spans);
}

Status evict(const MemSpans& spans) {
  State& s = state();
  const HeldDevices held(s, devices_of(s, spans));
  UMEM_RETURN_IF_ERROR(check_spans(s, held, spans));
  UMEM_RETURN_IF_ERROR(check_evictable(s, held, spans));
  return until_one_fails(s, held, spans,
                         [](Engine& engine, RangeId id) { return engine.hints().evict(id); });
}

Status read_mostly(const MemSpans& spans, bool on) {
  State& s = state();
  const HeldDevices held(s, devices_of(s, spans));
  UMEM_RETURN_IF_ERROR(check_spans(s, held, spans));
  return until_one_fails(s, held, spans, [&](Engine& engine, RangeId id) {
    return engine.hints().read_mostly(id, on);
  });
}

Result<std::size_t> discard(MemSpan span, std::uintptr_t stream) {
  State& s = state();
  const HeldDevices held(s, devices_of(s, {span}));
  UMEM_RETURN_IF_ERROR(check_spans(s, held, {span}));
  if (span.bytes == 0) return std::size_t{0};
  const MemSpan pages = whole_pages(with_padding(s, held, span));
  Status status;
  each_unit(s, held, pages, [&](Device& device, RangeId id, MemSpan) {
    if (status.ok() && device.engine.ledger().at(id).op_pins > 0)
      status = {Code::kBadState, "the block is in use by a running op"};
  });
  std::size_t done = 0;
  each_unit(s, held, pages, [&](Device& device, RangeId id, MemSpan part) {
    if (!status.ok()) return;
    Result<std::size_t> result =
        device.engine.hints().discard_live(id, part, reinterpret_cast<cu::CUstream>(stream));
    if (result.ok())
      done += result.value();
    else
      status = result.take_status();
  });
  if (!status.ok()) return status;
  return done;
}

Result<std::size_t> own_pages(MemSpan span) {
  State& s = state();
  const HeldDevices held(s, devices_of(s, {span}));
  UMEM_RETURN_IF_ERROR(check_spans(s, held, {span}));
  return span.bytes == 0 ? std::size_t{0} : whole_pages(with_padding(s, held, span)).bytes;
}

Result<bool> place_in_file(MemSpan span, const std::string& path, std::uint64_t offset) {
  State& s = state();
  const HeldDevices held(s, devices_of(s, {span}));
  if (!s.driver.place_in_file)
    return Status(Code::kNotSupported, "only the software device keeps memory in files");
  if (span.bytes == 0 || !check_spans(s, held, {span}).ok()) return false;
  const MemSpan pages = whole_pages(with_padding(s, held, span));
  if (pages.base != span.base || pages.bytes < span.bytes) return false;
  if (!check_evictable(s, held, {pages}).ok()) return false;
  UMEM_RETURN_IF_ERROR(s.driver.place_in_file(span.base, span.bytes, path, offset));
  each_unit(s, held, pages,
            [](Device& device, RangeId id, MemSpan) { device.engine.hints().placed_in_file(id); });
  return true;
}

std::vector<bool> kept_in_place(const MemSpans& spans) {
  State& s = state();
  const HeldDevices held(s, devices_of(s, spans));
  std::vector<bool> result;
  for (const MemSpan& span : spans) {
    bool any = false, all = true;
    if (s.open())
      each_unit(s, held, span, [&](Device& device, RangeId id, MemSpan) {
        any = true;
        all = all && device.engine.ledger().kept_in_place(id);
      });
    result.push_back(any && all);
  }
  return result;
}

Result<Placement> placement_of(MemSpan span) {
  State& s = state();
  const HeldDevices held(s, devices_of(s, {span}));
  UMEM_RETURN_IF_ERROR(check_spans(s, held, {span}));
  return look(s, held, span);
}

std::vector<PlacedBlock> placed_blocks() {
  State& s = state();
  std::vector<PlacedBlock> result;
  each_ordinal(s.opened, [&](int ordinal) {
    const HeldDevices held(s, mask_of(ordinal));
    held.each([&](const Device& device) {
      for (const arena::SegmentRow& segment : device.arena.describe())
        for (const arena::BlockRow& block : segment.blocks)
          if (block.allocated)
            result.push_back({block.address, look(s, held, {block.address, block.requested})});
    });
  });
  return result;
}

std::vector<BlockReport> blocks() {
  State& s = state();
  std::vector<BlockReport> result;
  each_device(s, [&](const Device& device) {
    const residency::Ledger& ledger = device.engine.ledger();
    for (RangeId id = 1; id < ledger.capacity(); ++id) {
      if (!ledger.has(id)) continue;
      const residency::Unit& unit = ledger.at(id);
      result.push_back({s.ranges[id].base, unit.bytes, residency::name(unit.tag),
                        residency::name(unit.family), residency::name(unit.state), unit.op_pins});
    }
  });
  return result;
}

}  // namespace umem::runtime
