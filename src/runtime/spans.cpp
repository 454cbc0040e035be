#include "runtime/spans.h"

#include <utility>
#include <vector>

#include "runtime/each_unit.h"

namespace umem::runtime {

using engine::Engine;
using managed::MemSpan;
using managed::RangeId;

DeviceMask devices_of(const State& s, const MemSpans& spans) {
  DeviceMask found = 0;
  for (const MemSpan& span : spans)
    for (std::uintptr_t at = span.base; at < span.base + span.bytes;
         at = align_down(at, kPageBytes) + kPageBytes)
      if (const RangeId id = s.ranges.find(reinterpret_cast<const void*>(at));
          id != managed::kNoRange)
        found |= mask_of(s.ranges.device_of(id));
  return found;
}

Status check_spans(const State& s, const HeldDevices& held, const MemSpans& spans) {
  if (!s.open()) return spans.empty() ? Status() : not_running(s);
  for (const MemSpan& span : spans) {
    std::size_t found = 0;
    each_unit(s, held, span, [&](Device&, RangeId, MemSpan part) { found += part.bytes; });
    if (found < span.bytes)
      return {Code::kInvalidArgument, "the address is not in memory that umem manages"};
  }
  return {};
}

Status bring_in(const State& s, const HeldDevices& held, const MemSpans& spans) {
  const auto each = [&](auto act) {
    for (const MemSpan& span : spans)
      each_unit(s, held, span,
                [&](Device& device, RangeId id, MemSpan) { act(device.engine, id); });
  };
  Status status;
  std::vector<std::pair<Engine*, RangeId>> movable;
  each([&](Engine& engine, RangeId id) {
    if (!engine.hints().pinned_in_place(id)) movable.emplace_back(&engine, id);
  });
  // So that none of them leaves for another one.
  each([](Engine& engine, RangeId id) { engine.ledger().pin(id); });
  for (const auto& [engine, id] : movable) {  // a smaller unit may fit where one did not
    Status brought = engine->hints().prefetch(id);
    if (status.ok()) status = std::move(brought);
  }
  each([](Engine& engine, RangeId id) { engine.ledger().unpin(id); });
  return status;
}

}  // namespace umem::runtime
