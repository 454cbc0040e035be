#include "runtime/holds.h"

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "runtime/spans.h"
#include "runtime/state.h"

namespace umem::runtime {
namespace {

using backing::RangeId;
using backing::Span;
using residency::Ledger;

constinit thread_local std::uint32_t t_scope = 0;

void begin(State& s, const Held& held) {
  each_unit(s, held.span, [&](Device& device, RangeId id, Span) {
    Ledger& ledger = device.engine.ledger();
    held.kind == Hold::kPin ? ledger.hold(id) : ledger.exempt(id);
  });
  s.holds.emplace(held.span.base, held);
}

Holds::iterator end(State& s, Holds::iterator at) {
  const Held& held = at->second;
  each_unit(s, held.span, [&](Device& device, RangeId id, Span) {
    Ledger& ledger = device.engine.ledger();
    held.kind == Hold::kPin ? ledger.unhold(id) : ledger.unexempt(id);
  });
  return s.holds.erase(at);
}

// What has the most pinned bytes, by label.
std::string largest_pins(const State& s) {
  std::map<std::string, std::size_t> by_label;
  for (const auto& [first, held] : s.holds)
    if (held.kind == Hold::kPin) by_label[held.label] += held.span.bytes;
  std::vector<std::pair<std::size_t, std::string>> rows;
  for (const auto& [label, bytes] : by_label) rows.emplace_back(bytes, label);
  std::sort(rows.rbegin(), rows.rend());
  rows.resize(std::min<std::size_t>(rows.size(), 3));
  std::string text;
  for (const auto& [bytes, label] : rows)
    text += (text.empty() ? "" : ", ") + format_bytes(bytes) + " " + label;
  return text.empty() ? "none" : text;
}

// Whether the budgets have room for more pins.
Status check_room(State& s, const Spans& spans) {
  Status status;
  s.each([&](Device& device) {
    std::vector<RangeId> fresh;
    for (const Span& span : spans)
      each_unit(s, span, [&](Device& owner, RangeId id, Span) {
        if (&owner == &device && device.engine.ledger().at(id).holds == 0) fresh.push_back(id);
      });
    std::sort(fresh.begin(), fresh.end());
    fresh.erase(std::unique(fresh.begin(), fresh.end()), fresh.end());
    std::size_t bytes = 0;
    for (RangeId id : fresh) bytes += device.engine.ledger().at(id).bytes;
    const residency::Limits& limits = device.engine.limits();
    const std::size_t share =
        limits.budget_bytes - std::min(limits.budget_bytes, limits.outside_bytes);
    const Status room = bytes > 0 ? device.engine.check_holds(bytes, share) : Status();
    if (!room.ok())
      status = {room.code(), "cannot pin " + format_bytes(bytes) + " more: " + room.message() +
                                 " (largest: " + largest_pins(s) +
                                 "); unpin some of it, or raise the budget"};
  });
  return status;
}

}  // namespace

std::uint32_t Scopes::number_of(const std::string& name) {
  const auto [at, fresh] = numbers_.emplace(name, static_cast<std::uint32_t>(names_.size()));
  if (fresh) names_.push_back(name);
  return at->second;
}

std::uint32_t current_scope() {
  return t_scope;
}

std::string set_scope(const std::string& name) {
  State& s = state();
  std::lock_guard guard(s.mutex);
  return s.scopes.name(std::exchange(t_scope, s.scopes.number_of(name)));
}

Result<std::uint64_t> hold(const Spans& spans, Hold kind, const std::vector<std::string>& labels) {
  State& s = state();
  std::lock_guard guard(s.mutex);
  UMEM_RETURN_IF_ERROR(check_spans(s, spans));
  if (kind == Hold::kPin) {
    UMEM_RETURN_IF_ERROR(check_room(s, spans));
    UMEM_RETURN_IF_ERROR(bring_in(s, spans));
  }
  const std::uint64_t number = ++s.held;
  for (std::size_t i = 0; i < spans.size(); ++i)
    if (spans[i].bytes > 0)
      begin(s, {spans[i], kind, number, i < labels.size() ? labels[i] : std::string()});
  return number;
}

Result<std::uint64_t> exempt_all(residency::Tag tag, std::size_t min_bytes, std::size_t max_bytes) {
  State& s = state();
  std::lock_guard guard(s.mutex);
  if (!s.accepting) return not_running();
  const residency::Exemption rule{++s.held, tag, min_bytes, max_bytes};
  s.exemptions.push_back(rule);
  s.each([&](Device& device) { device.engine.ledger().add_exemption(rule); });
  return rule.number;
}

void unhold(std::uint64_t number) {
  State& s = state();
  std::lock_guard guard(s.mutex);
  for (auto at = s.holds.begin(); at != s.holds.end();)
    at = at->second.number == number ? end(s, at) : std::next(at);
  std::erase_if(s.exemptions, [&](const auto& rule) { return rule.number == number; });
  s.each([&](Device& device) { device.engine.ledger().remove_exemption(number); });
}

bool unpin(Span span) {
  State& s = state();
  std::lock_guard guard(s.mutex);
  const auto [first, last] = s.holds.equal_range(span.base);
  auto newest = last;
  for (auto at = first; at != last; ++at)
    if (at->second.kind == Hold::kPin && at->second.span.bytes == span.bytes) newest = at;
  if (newest == last) return false;
  end(s, newest);
  return true;
}

void end_holds(State& s) {
  for (auto at = s.holds.begin(); at != s.holds.end();) at = end(s, at);
  for (const residency::Exemption& rule : s.exemptions)
    s.each([&](Device& device) { device.engine.ledger().remove_exemption(rule.number); });
  s.exemptions.clear();
}

void end_holds(State& s, const void* block, std::size_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(block);
  auto at = s.holds.lower_bound(first);
  while (at != s.holds.end() && at->first < first + bytes) at = end(s, at);
}

}  // namespace umem::runtime
