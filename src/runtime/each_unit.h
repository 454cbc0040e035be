// Maps a program's spans of bytes to units. Requires the locks of the devices that own them.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/units.h"
#include "runtime/state.h"

namespace umem::runtime {

// A device whose lock is held.
struct HeldDevice {
  const State& state;
  Device& device;
  Device* of(managed::RangeId id) const {
    return state.ranges.device_of(id) == device.place.device ? &device : nullptr;
  }
};

// Calls `act` with the device, the unit and the bytes of each part of the span. Bytes outside of
// these devices' units are skipped.
template <class Held, class Act>
void each_unit(const State& s, const Held& held, managed::MemSpan span, Act act) {
  for (std::uintptr_t at = span.base, last = span.base + span.bytes; at < last;) {
    const managed::RangeId id = s.ranges.find(reinterpret_cast<const void*>(at));
    Device* device = id == managed::kNoRange ? nullptr : held.of(id);
    if (!device) {
      at = align_down(at, kPageBytes) + kPageBytes;
      continue;
    }
    const managed::Range& range = s.ranges[id];
    const std::size_t whole = s.ranges[range.head].bytes;
    const std::uintptr_t next = std::min(last, range.base + s.ranges.piece_bytes(id, whole));
    if (device->engine.ledger().live(id)) act(*device, id, managed::MemSpan{at, next - at});
    at = next;
  }
}

}  // namespace umem::runtime
