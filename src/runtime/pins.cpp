#include "runtime/pins.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/format.h"
#include "runtime/pinned.h"
#include "runtime/spans.h"

namespace umem::runtime {
namespace {

using managed::MemSpan;
using managed::RangeId;

void add_pin(const State& s, const HeldDevices& held, const Pin& pin) {
  if (Device* owner = put_on(s, held, pin)) owner->pins.emplace(pin.span.base, pin);
}

// The labels with the most pinned bytes.
std::string largest_pins(const HeldDevices& held) {
  std::map<std::string, std::size_t> by_label;
  held.each([&](const Device& device) {
    for (const auto& [first, pin] : device.pins)
      if (pin.kind == PinKind::kPin) by_label[pin.label] += pin.span.bytes;
  });
  std::vector<std::pair<std::size_t, std::string>> rows;
  for (const auto& [label, bytes] : by_label) rows.emplace_back(bytes, label);
  std::sort(rows.rbegin(), rows.rend());
  rows.resize(std::min<std::size_t>(rows.size(), 3));
  std::string text;
  for (const auto& [bytes, label] : rows)
    text += (text.empty() ? "" : ", ") + format_bytes(bytes) + " " + label;
  return text.empty() ? "none" : text;
}

// Fails if a budget has no room for these pins.
Status check_available(const State& s, const HeldDevices& held, const MemSpans& spans) {
  Status status;
  held.each([&](Device& device) {
    std::vector<RangeId> fresh;
    for (const MemSpan& span : spans)
      each_unit(s, held, span, [&](Device& owner, RangeId id, MemSpan) {
        if (&owner == &device && device.engine.ledger().at(id).user_pins == 0) fresh.push_back(id);
      });
    std::sort(fresh.begin(), fresh.end());
    fresh.erase(std::unique(fresh.begin(), fresh.end()), fresh.end());
    std::size_t bytes = 0;
    for (RangeId id : fresh) bytes += device.engine.ledger().at(id).bytes;
    const engine::Limits& limits = device.engine.limits();
    const std::size_t share =
        limits.budget_bytes - std::min(limits.budget_bytes, limits.outside_bytes);
    const Status fits = bytes > 0 ? device.engine.hints().check_user_pins(bytes, share) : Status();
    if (!fits.ok())
      status = {fits.code(), "cannot pin " + format_bytes(bytes) + " more: " + fits.message() +
                                 " (largest: " + largest_pins(held) +
                                 "); unpin some of it, or raise the budget"};
  });
  return status;
}

}  // namespace

Result<std::uint64_t> add_pins(const MemSpans& spans, PinKind kind,
                               const std::vector<std::string>& labels) {
  State& s = state();
  const HeldDevices held(s, devices_of(s, spans));
  UMEM_RETURN_IF_ERROR(check_spans(s, held, spans));
  if (kind == PinKind::kPin) {
    UMEM_RETURN_IF_ERROR(check_available(s, held, spans));
    UMEM_RETURN_IF_ERROR(bring_in(s, held, spans));
  }
  const std::uint64_t number = ++s.last_pin_number;
  for (std::size_t i = 0; i < spans.size(); ++i)
    if (spans[i].bytes > 0)
      add_pin(s, held, {spans[i], kind, number, i < labels.size() ? labels[i] : std::string()});
  return number;
}

Result<std::uint64_t> exempt_all(residency::Tag tag, std::size_t min_bytes, std::size_t max_bytes) {
  State& s = state();
  const std::lock_guard registry(s.registry);
  if (!s.accepting) return not_running(s);
  const residency::Exemption rule{++s.last_pin_number, tag, min_bytes, max_bytes};
  s.exemptions.push_back(rule);
  each_device(s, [&](Device& device) { device.engine.ledger().add_exemption(rule); });
  return rule.number;
}

void remove_pins(std::uint64_t number) {
  State& s = state();
  {
    const std::lock_guard registry(s.registry);
    std::erase_if(s.exemptions, [&](const auto& rule) { return rule.number == number; });
  }
  each_device(s, [&](Device& device) {
    for (auto at = device.pins.begin(); at != device.pins.end();)
      at = at->second.number == number ? remove_pin(s, device, at) : std::next(at);
    device.engine.ledger().remove_exemption(number);
  });
}

bool unpin(MemSpan span) {
  State& s = state();
  bool found = false;
  const HeldDevices held(s, devices_of(s, {span}));
  held.each([&](Device& device) {
    const auto [first, last] = device.pins.equal_range(span.base);
    auto newest = last;
    for (auto at = first; at != last; ++at)
      if (at->second.kind == PinKind::kPin && at->second.span.bytes == span.bytes) newest = at;
    if (newest == last) return;
    remove_pin(s, device, newest);
    found = true;
  });
  return found;
}

}  // namespace umem::runtime
