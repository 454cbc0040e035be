#include "engine/sleep.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/format.h"

namespace umem::engine {

using driver::CallScope;

namespace {

bool has_tag(std::uint32_t tags, Tag tag) {
  return (tags >> static_cast<unsigned>(tag) & 1U) != 0;
}

}  // namespace

// True if the unit is still away and has the same block. A unit that came back for an op and was
// evicted again does not sleep.
bool Sleep::is_asleep(const SleepingUnit& sleeping) const {
  if (!state_.ledger.live(sleeping.id) || !state_.ledger.away(sleeping.id)) return false;
  const Unit& unit = state_.ledger.at(sleeping.id);
  return unit.born == sleeping.born && unit.arrival == sleeping.arrival;
}

bool Sleep::is_asleep(RangeId id) const {
  return std::any_of(sleeping_.begin(), sleeping_.end(),
                     [&](const SleepingUnit& unit) { return unit.id == id && is_asleep(unit); });
}

std::size_t Sleep::asleep_bytes() const {
  std::size_t bytes = 0;
  for (const SleepingUnit& unit : sleeping_)
    if (is_asleep(unit)) bytes += state_.ledger.at(unit.id).bytes;
  return bytes;
}

// Includes units that are away as far as umem knows: faults may have brought them, and the driver
// skips those with nothing to do.
std::vector<RangeId> Sleep::units_to_sleep(const SleepRequest& wanted) const {
  std::vector<RangeId> ids;
  for (RangeId id = 1; id < state_.ledger.capacity(); ++id)
    if (state_.ledger.live(id) && has_tag(wanted.tags, state_.ledger.at(id).tag)) ids.push_back(id);
  return ids;
}

std::size_t Sleep::missing_on_host(const std::vector<RangeId>& ids) const {
  std::size_t bytes = 0;
  for (RangeId id : ids) {
    const Unit& unit = state_.ledger.at(id);
    bytes += unit.bytes - std::min(unit.bytes, unit.host_bytes);
  }
  return bytes;
}

Status Sleep::check(const SleepRequest& wanted) {
  if (!state_.managed)
    return {Code::kNotSupported, "memory is not managed here, so nothing can be put to sleep"};
  UMEM_RETURN_IF_ERROR(state_.check_moves());
  const std::vector<RangeId> ids = units_to_sleep(wanted);
  for (RangeId id : ids)
    if (state_.ledger.at(id).op_pins > 0)
      return {Code::kBadState,
              "a running op uses memory that would be put to sleep; sleep between ops, when no "
              "other thread computes"};
  const std::size_t limit = state_.limits.host_budget_bytes;
  if (wanted.discard || limit == 0) return {};
  const std::size_t missing = missing_on_host(ids);
  if (state_.ledger.host_bytes() + missing > limit) moves_.release_cached();
  if (state_.ledger.host_bytes() + missing <= limit) return {};
  return {Code::kOutOfHostMemory,
          "to sleep " + format_bytes(missing) + " more of host memory are needed; the host holds " +
              format_bytes(state_.ledger.host_bytes()) + " of its budget of " +
              format_bytes(limit) + "; raise the host budget, or name fewer tags"};
}

Status Sleep::begin(const SleepRequest& wanted, std::size_t& bytes) {
  const CallScope scope(state_.table, state_.place);
  const std::vector<RangeId> ids = units_to_sleep(wanted);
  const std::size_t before = state_.ledger.resident_bytes();
  failures_before_ = transfers_.out().failures();
  // Forgets units that came back for an op, or are gone. Units that are away for another reason
  // stay away at `wake`.
  std::erase_if(sleeping_, [&](const SleepingUnit& unit) { return !is_asleep(unit); });
  std::vector<RangeId> awake;
  for (RangeId id : ids)
    if (state_.ledger.at(id).state == State::kDevice || (!state_.active() && !is_asleep(id)))
      awake.push_back(id);
  if (std::any_of(ids.begin(), ids.end(), [&](RangeId id) { return state_.ledger.at(id).joined; }))
    UMEM_RETURN_IF_ERROR(moves_.part_layout(&ids, wanted.discard));
  UMEM_RETURN_IF_ERROR(wanted.discard ? discard_units(ids) : sleep_units(ids));
  UMEM_RETURN_IF_ERROR(sharing_.release_dead());
  bytes = before - state_.ledger.resident_bytes();
  for (RangeId id : awake) {
    if (!state_.ledger.away(id)) continue;
    sleeping_.push_back(
        {id, state_.ledger.at(id).born, state_.ledger.at(id).arrival, wanted.number});
    if (!state_.active()) bytes += state_.ledger.at(id).bytes;  // at most
  }
  return {};
}

Status Sleep::sleep_units(const std::vector<RangeId>& ids) {
  if (ids.empty()) return {};
  if (!state_.active()) {
    for (RangeId id : ids) state_.ledger.hold_host(id);
    return transfers_.send_back(ids);
  }
  std::vector<RangeId> again;
  for (RangeId id : ids)
    if (state_.ledger.away(id)) again.push_back(id);
  UMEM_RETURN_IF_ERROR(moves_.send_out(ids));
  return moves_.send_again(again);
}

// A discard, if the driver has it, alone leaves the memory with the driver, which counts it as used
// until it is needed. Sending it to the host afterwards frees it without a copy, but takes host
// memory, which the host budget may not allow.
Status Sleep::discard_units(const std::vector<RangeId>& ids) {
  if (ids.empty()) return {};
  for (RangeId id : ids)
    if (state_.ledger.at(id).read_mostly) UMEM_RETURN_IF_ERROR(write_back_.advise(id, false));
  UMEM_RETURN_IF_ERROR(transfers_.discard(ids));
  const bool discarded = transfers_.local().can_discard();
  std::vector<RangeId> leaving;
  for (RangeId id : ids) {
    const Unit& unit = state_.ledger.at(id);
    const bool leaves = moves_.fits_on_host(id);
    if (discarded || unit.state == State::kHost)
      state_.counters.bytes_discarded += unit.bytes;
    else if (leaves && unit.state == State::kDevice)
      state_.counters.bytes_out += unit.bytes;  // by a copy
    if (!leaves && !discarded) continue;
    if (state_.active()) state_.ledger.set_state(id, leaves ? State::kHost : State::kVoid);
    if (discarded) state_.ledger.set_discarded(id);
    if (!leaves) continue;
    state_.ledger.hold_host(id);
    leaving.push_back(id);
  }
  if (leaving.empty()) return {};
  return transfers_.send_discarded(leaving);
}

Status Sleep::finish() {
  const CallScope scope(state_.table, state_.place);
  transfers_.out().issue_until(transfers_.out().last());
  if (transfers_.out().failures() == failures_before_) return {};
  return {Code::kDriver,
          "the driver refused to move some of the memory to the host, and it stays on the device"};
}

std::vector<Sleep::SleepingUnit> Sleep::take_sleeping(std::uint32_t tags, std::uint64_t number) {
  std::vector<SleepingUnit> taken;
  std::erase_if(sleeping_, [&](const SleepingUnit& unit) {
    const bool same = state_.ledger.live(unit.id) && state_.ledger.at(unit.id).born == unit.born;
    if (!same) return true;  // freed meanwhile
    if (number != 0 && unit.number != number) return false;
    if (!has_tag(tags, state_.ledger.at(unit.id).tag)) return false;
    if (is_asleep(unit)) taken.push_back(unit);
    return true;
  });
  std::sort(taken.begin(), taken.end(), [&](const SleepingUnit& a, const SleepingUnit& b) {
    return state_.ledger.at(a.id).last_use < state_.ledger.at(b.id).last_use;
  });
  return taken;
}

Status Sleep::wake(std::uint32_t tags, std::uint64_t number, std::size_t& bytes) {
  bytes = 0;
  if (!state_.managed) return {};
  const CallScope scope(state_.table, state_.place);
  const std::vector<SleepingUnit> all = take_sleeping(tags, number);
  // Pinned units come back, and others are evicted for them: pins are granted only if they fit.
  const auto held = [&](const SleepingUnit& unit) {
    return state_.ledger.at(unit.id).user_pins > 0;
  };
  std::size_t pinned = 0;
  for (const SleepingUnit& unit : all) pinned += held(unit) ? state_.ledger.at(unit.id).bytes : 0;
  if (state_.active() && pinned > 0) moves_.make_room(pinned);
  // If not all others fit, those used last come back.
  const std::size_t free = state_.view().available_bytes;
  std::size_t available = free - std::min(free, pinned);
  auto first = all.end();
  for (; first != all.begin(); --first) {
    const SleepingUnit& last = *std::prev(first);
    if (held(last)) continue;
    if (state_.ledger.at(last.id).bytes > available) break;
    available -= state_.ledger.at(last.id).bytes;
  }
  FirstError error;
  for (auto it = all.begin(); it != all.end(); ++it) {
    if (it < first && !held(*it)) continue;
    // Not as dead bytes, even if they were discarded: the program may have written them since
    // without umem noticing.
    // Memory that no op has named, such as a workspace, may be used unseen, so it has to be there.
    const Unit& unit = state_.ledger.at(it->id);
    const bool needed = state_.mapped() && unit.fresh;
    if (state_.active() && !held(*it) && !needed) {
      moves_.bring(it->id);
    } else {
      const cu::CUstream stream = unit.stream;
      error.keep(moves_.prefetch(it->id, needed ? &stream : nullptr));
    }
    bytes += !state_.active() || !state_.ledger.away(it->id) ? state_.ledger.at(it->id).bytes : 0;
  }
  if (state_.follows_plans())  // from now on: a plan would undo the sleep at the next op
    for (const SleepingUnit& unit : all)
      if (state_.ledger.away(unit.id)) state_.planned->evicted(unit.id);
  return error.take();
}

}  // namespace umem::engine
