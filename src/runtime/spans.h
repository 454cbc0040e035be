// From a program's spans of bytes to units. With the locks of the devices that they are on.
#pragma once
#include <algorithm>

#include "runtime/hints.h"
#include "runtime/state.h"

namespace umem::runtime {

// The devices that have some of them, as far as is known without a lock.
DeviceMask devices_of(const State& s, const MemSpans& spans);

// The one device whose lock is held.
struct HeldDevice {
  const State& state;
  Device& device;
  Device* of(managed::RangeId id) const {
    return state.ranges.device_of(id) == device.place.device ? &device : nullptr;
  }
};

// Calls `act` with the device and the unit of every part of the span, and that part. Bytes that no
// unit of these devices holds are left out.
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

// All of it is live memory of umem's.
Status check_spans(const State& s, const HeldDevices& held, const MemSpans& spans);
// What of it is away comes in, none of it in the place of another part.
Status bring_in(const State& s, const HeldDevices& held, const MemSpans& spans);

}  // namespace umem::runtime
