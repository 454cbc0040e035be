// Applies the pins of a device's blocks to the units that contain their bytes. Requires the
// device's lock.
#pragma once
#include <cstddef>

#include "managed/memory_ops.h"
#include "runtime/each_unit.h"
#include "runtime/state.h"

namespace umem::runtime {

// Applies the pin to the units of its span, which lies in one block and so on one device. Returns
// the device; null if there is none.
template <class Held>
Device* put_on(const State& s, const Held& held, const Pin& pin) {
  Device* owner = nullptr;
  each_unit(s, held, pin.span, [&](Device& device, managed::RangeId id, managed::MemSpan) {
    residency::Ledger& ledger = device.engine.ledger();
    pin.kind == PinKind::kPin ? ledger.user_pin(id) : ledger.exempt(id);
    owner = &device;
  });
  return owner;
}
// Ends one pin and returns the next one.
Pins::iterator remove_pin(const State& s, Device& owner, Pins::iterator at);
// End all pins of a device, or those in a block that is released.
void end_pins(State& s, Device& device);
void end_pins(State& s, Device& device, const void* block, std::size_t bytes);
// Take a range's pins off its units before it is cut, and apply them to its new units afterwards.
void take_pins_off(const State& s, Device& device, managed::MemSpan range);
void put_pins_on(const State& s, Device& device, managed::MemSpan range);

}  // namespace umem::runtime
