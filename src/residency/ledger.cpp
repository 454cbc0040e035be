#include "residency/ledger.h"

#include <algorithm>

namespace umem::residency {

const char* name(State state) {
  static constexpr const char* kNames[] = {"none", "void", "device", "host", "dead", "gone"};
  return kNames[static_cast<std::size_t>(state)];
}

Ledger::List* Ledger::list_of(State state) {
  if (state == State::kDevice) return &resident_list_;
  if (state == State::kDead) return &dead_list_;
  return nullptr;
}

void Ledger::link(List& list, RangeId id) {
  Unit& unit = units_[id];
  unit.older = list.newest;
  unit.newer = kNoRange;
  (list.newest ? units_[list.newest].newer : list.oldest) = id;
  list.newest = id;
}

void Ledger::unlink(List& list, RangeId id) {
  Unit& unit = units_[id];
  (unit.older ? units_[unit.older].newer : list.oldest) = unit.newer;
  (unit.newer ? units_[unit.newer].older : list.newest) = unit.older;
  unit.older = unit.newer = kNoRange;
}

void Ledger::account(const Unit& unit, bool entering) {
  const auto book = [&](std::size_t& total) {
    total = entering ? total + unit.bytes : total - unit.bytes;
  };
  if (unit.state == State::kDevice || unit.state == State::kDead) book(resident_);
  if (unit.state == State::kDead) book(dead_);
  if (unit.state == State::kVoid || unit.state == State::kDevice || unit.state == State::kHost)
    book(live_);
  peak_resident_ = std::max(peak_resident_, resident_);
}

void Ledger::add(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family) {
  if (units_.size() <= id) units_.resize(id + 1);
  set_state(id, State::kNone);
  Unit& unit = units_[id];
  if (unit.pins > 0) pinned_ += bytes - unit.bytes;
  if (unit.holds > 0) held_ += bytes - unit.bytes;
  unit.bytes = bytes;
  unit.segment = segment;
  unit.prefetched_unused = false;
  unit.last_use = ++clock_;
  unit.born = ++births_;
  set_tag(id, tag, family);
  set_state(id, State::kVoid);
}

void Ledger::revive(RangeId id, Tag tag, Family family) {
  units_[id].born = ++births_;
  set_state(id, State::kDevice);
  set_tag(id, tag, family);
  touch(id);
}

void Ledger::drop(RangeId id) {
  set_state(id, State::kGone);
  units_[id].dropped = true;
  dropped_ += units_[id].bytes;
}

void Ledger::remove(RangeId id) {
  set_state(id, State::kNone);
  Unit& unit = units_[id];
  if (unit.pins > 0) pinned_ -= unit.bytes;
  if (unit.holds > 0) held_ -= unit.bytes;
  host_ -= unit.host_bytes;
  unit = Unit{};
}

void Ledger::set_state(RangeId id, State state) {
  Unit& unit = units_[id];
  if (unit.state == state) return;
  if (unit.dropped) dropped_ -= unit.bytes;
  unit.dropped = unit.discarded = false;
  if (state == State::kDevice) unit.first_use = 0;
  account(unit, false);
  if (List* list = list_of(unit.state)) unlink(*list, id);
  unit.state = state;
  account(unit, true);
  if (List* list = list_of(state)) link(*list, id);
  if (state == State::kHost) hold_host(id);
}

bool Ledger::exempted(const Unit& unit) const {
  return std::any_of(exemptions_.begin(), exemptions_.end(), [&](const Exemption& rule) {
    if (rule.tag != Tag::kCount && rule.tag != unit.tag) return false;
    if (unit.segment) return rule.min_bytes < kPageBytes;
    return rule.min_bytes <= unit.asked_bytes && unit.asked_bytes <= rule.max_bytes;
  });
}

void Ledger::remove_exemption(std::uint64_t number) {
  std::erase_if(exemptions_, [&](const Exemption& rule) { return rule.number == number; });
}

void Ledger::hold_host(RangeId id) {
  Unit& unit = units_[id];
  if (unit.host_bytes >= unit.bytes) return;
  host_ += unit.bytes - unit.host_bytes;
  unit.host_bytes = unit.bytes;
  peak_host_ = std::max(peak_host_, host_);
}

void Ledger::set_tag(RangeId id, Tag tag, Family family) {
  units_[id].tag = tag;
  units_[id].family = family;
}

void Ledger::touch(RangeId id) {
  Unit& unit = units_[id];
  unit.last_use = ++clock_;
  if (unit.first_use == 0) unit.first_use = unit.last_use;
  unit.prefetched_unused = unit.discarded = false;
  List* list = list_of(unit.state);
  if (!list || list->newest == id) return;
  unlink(*list, id);
  link(*list, id);
}

}  // namespace umem::residency
