// From a program's spans of bytes to units. With the lock held.
#pragma once
#include <algorithm>

#include "runtime/hints.h"
#include "runtime/state.h"

namespace umem::runtime {

inline Status not_running() {
  return {Code::kBadState, "umem is not running; call umem.enable() first"};
}

// Calls `act` with the device and the unit of every part of the span, and that part. Bytes that no
// unit holds are left out.
template <class Act>
void each_unit(const State& s, managed::MemSpan span, Act act) {
  for (std::uintptr_t at = span.base, last = span.base + span.bytes; at < last;) {
    const managed::RangeId id = s.ranges.find(reinterpret_cast<const void*>(at));
    if (id == managed::kNoRange) {
      at = align_down(at, kPageBytes) + kPageBytes;
      continue;
    }
    const managed::Range& range = s.ranges[id];
    const std::size_t whole = s.ranges[range.head].bytes;
    const std::uintptr_t next = std::min(last, range.base + s.ranges.piece_bytes(id, whole));
    Device& device = s.owner(id);
    if (device.engine.ledger().live(id)) act(device, id, managed::MemSpan{at, next - at});
    at = next;
  }
}

// All of it is live memory of umem's.
Status check_spans(const State& s, const MemSpans& spans);
// What of it is away comes in, none of it in the place of another part.
Status bring_in(State& s, const MemSpans& spans);

}  // namespace umem::runtime
