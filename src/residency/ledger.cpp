#include "residency/ledger.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

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

// The transitions that set_state allows. A failed discard leaves the unit dead: kGone -> kDead.
bool Ledger::may_become(State from, State to) {
  switch (from) {
    case State::kNone:
      return to == State::kVoid;
    case State::kVoid:
    case State::kHost:
      return to != State::kDead;
    case State::kDevice:
      return to != State::kGone;
    case State::kDead:
      return to == State::kDevice || to == State::kGone || to == State::kNone;
    case State::kGone:
      return to == State::kNone || to == State::kDead;
  }
  return false;
}

void Ledger::link(List& list, RangeId id) {
  Unit& unit = units_[id];
  UMEM_ASSERT(unit.older == kNoRange && unit.newer == kNoRange && list.newest != id,
              "a unit is in one list, once");
  unit.older = list.newest;
  unit.newer = kNoRange;
  (list.newest ? units_[list.newest].newer : list.oldest) = id;
  list.newest = id;
}

void Ledger::unlink(List& list, RangeId id) {
  Unit& unit = units_[id];
  UMEM_ASSERT((unit.older ? units_[unit.older].newer : list.oldest) == id, "the list has the unit");
  UMEM_ASSERT((unit.newer ? units_[unit.newer].older : list.newest) == id, "the list has the unit");
  (unit.older ? units_[unit.older].newer : list.oldest) = unit.newer;
  (unit.newer ? units_[unit.newer].older : list.newest) = unit.older;
  unit.older = unit.newer = kNoRange;
}

void Ledger::account(const Unit& unit, bool entering) {
  const auto adjust = [&](std::size_t& total) {
    UMEM_ASSERT(entering || total >= unit.bytes, "what leaves was counted when it came");
    total = entering ? total + unit.bytes : total - unit.bytes;
  };
  if (unit.state == State::kDevice || unit.state == State::kDead) adjust(resident_);
  if (unit.state == State::kDead) adjust(dead_);
  if (unit.state == State::kVoid || unit.state == State::kDevice || unit.state == State::kHost)
    adjust(live_);
  peak_resident_ = std::max(peak_resident_, resident_);
}

void Ledger::add(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family) {
  if (units_.size() <= id) units_.resize(id + 1);
  UMEM_ASSERT(id != kNoRange && !live(id), "only a range without a live block is admitted");
  set_state(id, State::kNone);
  Unit& unit = units_[id];
  if (unit.op_pins > 0) op_pinned_ += bytes - unit.bytes;
  if (unit.user_pins > 0) user_pinned_ += bytes - unit.bytes;
  unit.bytes = bytes;
  unit.segment = segment;
  unit.prefetched_unused = unit.joined = false;
  unit.last_use = ++clock_;
  unit.fresh = true;
  note_idle(unit);
  unit.born = ++births_;
  set_tag(id, tag, family);
  set_state(id, State::kVoid);
}

void Ledger::revive(RangeId id, Tag tag, Family family) {
  UMEM_ASSERT(at(id).state == State::kDead, "only dead bytes are revived");
  units_[id].born = ++births_;
  note_idle(units_[id]);
  set_state(id, State::kDevice);
  set_tag(id, tag, family);
  touch(id);
  units_[id].fresh = true;
}

void Ledger::split(RangeId id, RangeId rest, std::size_t at) {
  if (!has(id) || units_[id].bytes <= at) return;
  if (units_.size() <= rest) units_.resize(rest + 1);
  Unit &unit = units_[id], &made = units_[rest];
  UMEM_ASSERT(unit.op_pins == 0, "no op uses a unit that is split");
  UMEM_ASSERT(made.state == State::kNone && made.host_bytes == 0, "the rest is no unit yet");
  made = unit;
  made.bytes = unit.bytes - at;
  made.host_bytes = unit.host_bytes - std::min(unit.host_bytes, at);
  unit.bytes = at;
  unit.host_bytes -= made.host_bytes;
  if (unit.in_collective) collectives_.push_back(rest);
  if (List* list = list_of(unit.state)) {  // next to it: it was used at the same time
    made.older = id;
    (unit.newer ? units_[unit.newer].older : list->newest) = rest;
    unit.newer = rest;
  }
}

void Ledger::begin_collective(RangeId id, std::size_t most) {
  std::erase_if(collectives_, [this](RangeId known) { return !units_[known].in_collective; });
  if (!live(id) || units_[id].in_collective) return;
  units_[id].in_collective = true;
  collectives_.push_back(id);
  std::size_t bytes = 0;
  for (auto at = collectives_.rbegin(); at != collectives_.rend(); ++at) {
    Unit& unit = units_[*at];
    if (unit.state == State::kDevice) bytes += unit.bytes;
    unit.in_collective = bytes <= most || unit.state != State::kDevice;
  }
}

bool Ledger::end_collectives() {
  bool any = false;
  for (RangeId id : std::exchange(collectives_, {}))
    any = std::exchange(units_[id].in_collective, false) || any;
  return any;
}

void Ledger::note_idle(Unit& unit) {
  if (unit.death > 0) unit.idle = clock_ - unit.death;
}

RangeId Ledger::last_to_revive() const {
  constexpr int kMost = 256;  // that are compared
  RangeId last = kNoRange;
  std::uint64_t when = 0;
  int left = kMost;
  for (RangeId id = dead_list_.oldest; id != kNoRange && left-- > 0; id = units_[id].newer) {
    std::uint64_t then = units_[id].death + units_[id].idle;
    if (then < clock_) then = clock_ + (clock_ - then);
    if (last != kNoRange && then <= when) continue;
    last = id;
    when = then;
  }
  return last;
}

void Ledger::drop(RangeId id) {
  UMEM_ASSERT(at(id).state == State::kDead, "only dead bytes are dropped");
  set_state(id, State::kGone);
  units_[id].dropped = true;
  dropped_ += units_[id].bytes;
}

void Ledger::remove(RangeId id) {
  set_state(id, State::kNone);
  Unit& unit = units_[id];
  if (unit.op_pins > 0) op_pinned_ -= unit.bytes;
  if (unit.user_pins > 0) user_pinned_ -= unit.bytes;
  host_ -= unit.host_bytes;
  unit = Unit{};
}

void Ledger::set_state(RangeId id, State state) {
  Unit& unit = units_[id];
  if (unit.state == state) return;
  UMEM_ASSERT(may_become(unit.state, state), "no such change of state");
  if (unit.dropped) dropped_ -= unit.bytes;
  unit.dropped = unit.discarded = false;
  if (state != State::kDevice) unit.in_collective = false;
  if (state == State::kDevice) unit.first_use = 0;
  if (state == State::kHost) unit.used_away = false;
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
    return rule.min_bytes <= unit.requested_bytes && unit.requested_bytes <= rule.max_bytes;
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

void Ledger::check_invariants(const Idle& idle) const {
  if constexpr (!kAsserts) return;
  std::size_t resident = idle.dead, dead = idle.dead, dropped = idle.dropped, host = idle.host;
  std::size_t live_sum = 0, op_pinned = 0, user_pinned = 0, listed = 0;
  for (const Unit& unit : units_) {
    const bool is_dead = unit.state == State::kDead, here = unit.state == State::kDevice;
    resident += is_dead || here ? unit.bytes : 0;
    dead += is_dead ? unit.bytes : 0;
    dropped += unit.dropped ? unit.bytes : 0;
    host += unit.host_bytes;
    live_sum += here || unit.state == State::kHost || unit.state == State::kVoid ? unit.bytes : 0;
    op_pinned += unit.op_pins > 0 ? unit.bytes : 0;
    user_pinned += unit.user_pins > 0 ? unit.bytes : 0;
    listed += is_dead || here ? 1 : 0;
  }
  UMEM_ASSERT(resident == resident_, "resident bytes are the sum over the units");
  UMEM_ASSERT(dead == dead_, "dead bytes are the sum over the units");
  UMEM_ASSERT(dropped == dropped_, "dropped bytes are the sum over the units");
  UMEM_ASSERT(host == host_, "host bytes are the sum over the units");
  UMEM_ASSERT(live_sum == live_, "live bytes are the sum over the units");
  UMEM_ASSERT(op_pinned == op_pinned_, "bytes pinned by ops are the sum over the units");
  UMEM_ASSERT(user_pinned == user_pinned_,
              "bytes pinned by the program are the sum over the units");
  for (const auto& [list, state] :
       {std::pair(resident_list_, State::kDevice), std::pair(dead_list_, State::kDead)})
    for (RangeId id = list.oldest; id != kNoRange; id = units_[id].newer, --listed)
      UMEM_ASSERT(units_[id].state == state && listed > 0, "a list has the units of its state");
  UMEM_ASSERT(listed == 0, "every unit on the device is in a list");
}

void Ledger::set_tag(RangeId id, Tag tag, Family family) {
  units_[id].tag = tag;
  units_[id].family = family;
}

void Ledger::touch(RangeId id, bool inner) {
  Unit& unit = units_[id];
  unit.last_use = ++clock_;
  unit.used_away = unit.used_away || away(id);
  unit.fresh = unit.fresh && inner;
  if (unit.first_use == 0) unit.first_use = unit.last_use;
  unit.prefetched_unused = unit.discarded = false;
  List* list = list_of(unit.state);
  if (!list || list->newest == id) return;
  unlink(*list, id);
  link(*list, id);
}

}  // namespace umem::residency
