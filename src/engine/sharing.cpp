#include "engine/sharing.h"

#include <algorithm>

namespace umem::engine {

using driver::CallScope;

namespace {

bool has(const std::vector<RangeId>& ids, RangeId id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

void Sharing::close() {
  // Before the addresses are freed. Mapped units that died may still be discarded.
  if (state_.mapped()) transfers_.finish_issuing();
  transfers_.out().issue_until(pages_.departure);
  const SharedPages::Amounts left = pages_.amounts();
  state_.ledger.forget_idle(left.dead, left.dropped, left.host);
  state_.attached.detach(pages_.span());
  pages_.close();
  state_.joined_idle = 0;
  joined_ = false;
}

Status Sharing::join(bool stays) {
  transfers_.finish_issuing();  // what leaves makes room, and may have had these addresses
  const managed::MemSpan all = pages_.span();
  if (!state_.fits(all.bytes))
    return {Code::kOutOfDeviceMemory, "the layout does not fit beside what lives"};
  const CallScope scope(state_.table, state_.place);
  UMEM_RETURN_IF_ERROR(state_.mapped()->place(all));
  pages_.take(all);
  pages_.give_back(all, true, 0);
  state_.ledger.add_idle_dead(all.bytes);
  state_.joined_idle = all.bytes;
  joined_ = true;
  stays_ = stays;
  return {};
}

Status Sharing::may_part(bool at_rest, const std::vector<RangeId>& lost) const {
  const Ledger& ledger = state_.ledger;
  std::size_t missing = 0;
  for (RangeId id = 1; id < ledger.capacity(); ++id) {
    const Unit& unit = ledger.at(id);
    if (!pages_.contains(state_.ranges[id].base)) continue;
    // Also pins of blocks that were freed inside of the op.
    const bool unseen = ledger.live(id) && (unit.fresh || unit.in_collective);
    if (unit.op_pins > 0 || (unseen && !at_rest))
      return {Code::kBadState, "a running op, or a collective, may be using the layout"};
    if (ledger.live(id) && !has(lost, id))
      missing += unit.bytes - std::min(unit.bytes, unit.host_bytes);
  }
  const std::size_t limit = state_.limits.host_budget_bytes;
  if (limit == 0 || ledger.host_bytes() + missing <= limit) return {};
  return {Code::kOutOfHostMemory, "the host budget has no room for the blocks of the layout"};
}

Status Sharing::part(bool at_rest, const std::vector<RangeId>& lost, std::vector<RangeId>& parted) {
  if (!joined_) return {};
  UMEM_RETURN_IF_ERROR(may_part(at_rest, lost));
  Ledger& ledger = state_.ledger;
  std::vector<RangeId> ids;
  spans_.clear();
  for (RangeId id = 1; id < ledger.capacity(); ++id) {
    if (!ledger.live(id) || !ledger.at(id).joined) continue;
    ids.push_back(id);
    if (!has(lost, id)) spans_.push_back(state_.span(id));
  }
  UMEM_RETURN_IF_ERROR(transfers_.finish());
  const CallScope scope(state_.table, state_.place);
  UMEM_RETURN_IF_ERROR(state_.mapped()->part(pages_.span(), spans_));
  for (RangeId id : ids) {
    ledger.set_joined(id, false);
    parted.push_back(id);
    ledger.set_state(id, has(lost, id) ? State::kVoid : State::kHost);
    if (has(lost, id)) continue;
    ledger.hold_host(id);
    state_.counters.bytes_out += ledger.at(id).bytes;
    ++state_.counters.evictions;
  }
  ledger.forget_idle(pages_.amounts().dead, 0, 0);
  spans_.clear();
  pages_.lose_track(spans_);
  state_.joined_idle = 0;
  joined_ = false;
  return {};
}

Result<std::size_t> Sharing::admit(RangeId id, std::size_t bytes, Tag tag, Family family,
                                   cu::CUstream stream) {
  Ledger& ledger = state_.ledger;
  const managed::MemSpan place{state_.ranges[id].base, bytes};
  const SharedPages::Amounts found = pages_.count(place);
  const bool whole = found.dead == bytes;
  // Already waited for, unless the wait failed.
  if (whole) UMEM_RETURN_IF_ERROR(transfers_.await(pages_.arrival, pages_.populated, stream));
  pages_.take(place);
  pages_.stream = stream;
  ledger.forget_idle(found.dead, found.dropped, 0);
  ledger.add(id, bytes, false, tag, family);
  ledger.set_stream(id, stream);
  ledger.set_death(id);  // of the pages' previous block
  ledger.take_host(id, found.host);
  ledger.set_arrival(id, pages_.arrival);
  ledger.set_populated(id, pages_.populated);
  ledger.set_departure(id, pages_.departure);
  if (whole) ledger.set_state(id, State::kDevice);
  if (joined_) {
    UMEM_ASSERT(whole, "joined pages are all in place");
    state_.joined_idle -= bytes;
    ledger.set_joined(id, true);
  }
  return found.dead;
}

void Sharing::retire(RangeId id) {
  Ledger& ledger = state_.ledger;
  const Unit unit = ledger.at(id);
  const managed::MemSpan place = state_.span(id);
  pages_.arrival = std::max(pages_.arrival, unit.arrival);
  pages_.departure = std::max(pages_.departure, unit.departure);
  pages_.populated = std::max(pages_.populated, unit.populated);
  if (unit.state == State::kHost) state_.counters.bytes_discarded += unit.bytes;
  if (unit.state == State::kVoid && !state_.asynchronous() && state_.active()) {
    const CallScope scope(state_.table, state_.place);
    state_.count_error(transfers_.discard({id}));  // drop pages that faults brought to the device
  }
  bool resident = unit.state == State::kDevice || unit.joined;
  if (state_.mapped() && !unit.joined) {  // no other block takes its pages over
    const CallScope scope(state_.table, state_.place);
    state_.count_error(transfers_.discard({id}));
    pages_.populated = std::max(pages_.populated, ledger.at(id).populated);
    resident = false;
  }
  ledger.set_state(id, State::kNone);
  ledger.give_host(id);
  pages_.give_back(place, resident, unit.host_bytes);
  if (resident) ledger.add_idle_dead(unit.bytes);
  if (unit.joined) state_.joined_idle += unit.bytes;
}

void Sharing::drop(std::size_t bytes) {
  if (state_.fits(bytes)) return;
  state_.count_error(drop_dead(state_.taken() + bytes - state_.limits.budget_bytes, false));
}

Status Sharing::release_dead() {
  return drop_dead(pages_.amounts().dead, true);
}

// With `give_back` the driver gets the dropped memory at once, and not only when it is short. If it
// cannot discard, a copy to the host is the only way.
Status Sharing::drop_dead(std::size_t bytes, bool give_back) {
  if (bytes == 0 || pages_.amounts().dead == 0 || joined_) return {};
  spans_.clear();
  pages_.find_dead(bytes, spans_);
  UMEM_RETURN_IF_ERROR(discard(spans_));
  std::size_t dropped = 0;
  for (const managed::MemSpan& span : spans_) dropped += span.bytes;
  pages_.drop(spans_);
  state_.ledger.drop_idle(dropped);
  const bool discarded = transfers_.local().can_discard();  // the driver may just have refused it
  if (discarded) state_.counters.bytes_discarded += dropped;
  return give_back || !discarded ? send_dropped(dropped) : Status();
}

// `spans_`, which have so many bytes together.
Status Sharing::send_dropped(std::size_t bytes) {
  std::size_t missing = 0;
  for (const managed::MemSpan& span : spans_) missing += span.bytes - pages_.count(span).host;
  const std::size_t limit = state_.limits.host_budget_bytes;
  if (limit > 0 && state_.ledger.host_bytes() + missing > limit) return {};  // the driver's to take
  Result<Ticket> ticket = transfers_.send_discarded(spans_);
  if (!ticket.ok()) return ticket.take_status();
  pages_.departure = ticket.value();
  pages_.hold_host(spans_);
  state_.ledger.send_idle(bytes, missing);
  if (!transfers_.local().can_discard()) state_.counters.bytes_out += bytes;  // by a copy
  return {};
}

void Sharing::forget_dropped() {
  state_.ledger.forget_idle(0, pages_.amounts().dropped, 0);
  pages_.forget_dropped();
  spans_.clear();
  pages_.find_dead(pages_.amounts().dead, spans_);
  for (const managed::MemSpan& span : spans_) state_.attached.attach(span);
}

void Sharing::lose_track(bool drop) {
  if (joined_) return;  // it stays where it was placed
  const SharedPages::Amounts left = pages_.amounts();
  state_.ledger.forget_idle(left.dead, left.dropped, 0);
  spans_.clear();
  pages_.lose_track(spans_);
  if (drop && !spans_.empty()) state_.count_error(discard(spans_));
}

}  // namespace umem::engine
