#include "runtime/pinned.h"

namespace umem::runtime {

using managed::MemSpan;
using managed::RangeId;
using residency::Ledger;

static void take_off(const State& s, Device& owner, const Pin& pin) {
  each_unit(s, HeldDevice{s, owner}, pin.span, [&](Device& device, RangeId id, MemSpan) {
    Ledger& ledger = device.engine.ledger();
    pin.kind == PinKind::kPin ? ledger.user_unpin(id) : ledger.unexempt(id);
  });
}

Pins::iterator remove_pin(const State& s, Device& owner, Pins::iterator at) {
  take_off(s, owner, at->second);
  return owner.pins.erase(at);
}

void end_pins(State& s, Device& device) {
  for (auto at = device.pins.begin(); at != device.pins.end();) at = remove_pin(s, device, at);
  for (const residency::Exemption& rule : s.exemptions)
    device.engine.ledger().remove_exemption(rule.number);
}

void end_pins(State& s, Device& device, const void* block, std::size_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(block);
  auto at = device.pins.lower_bound(first);
  while (at != device.pins.end() && at->first < first + bytes) at = remove_pin(s, device, at);
}

void take_pins_off(const State& s, Device& device, MemSpan range) {
  for (auto at = device.pins.lower_bound(range.base);
       at != device.pins.end() && at->first < range.base + range.bytes; ++at)
    take_off(s, device, at->second);
}

void put_pins_on(const State& s, Device& device, MemSpan range) {
  for (auto at = device.pins.lower_bound(range.base);
       at != device.pins.end() && at->first < range.base + range.bytes; ++at)
    put_on(s, HeldDevice{s, device}, at->second);
}

}  // namespace umem::runtime
