#include "engine/transfers.h"

#include <algorithm>
#include <utility>

namespace umem::engine {

using driver::CallScope;

Transfers::Transfers(EngineState& state)
    : state_(state),
      in_(state.table, state.place, state.mapped(), state.mapped()),
      out_(state.table, state.place, state.asynchronous() || state.mapped(), state.mapped()),
      local_(state.table, state.place, false, state.mapped()),
      drops_(state.table, state.place, true, state.mapped()),
      streams_(state.table, state.place) {}

std::vector<Lane*> Transfers::lanes() {
  std::vector<Lane*> all = {&in_, &out_, &local_};
  if (state_.mapped()) all.push_back(&drops_);
  return all;
}

Status Transfers::open() {
  for (Lane* lane : lanes()) UMEM_RETURN_IF_ERROR(lane->open());
  return {};
}

Status Transfers::close() {
  FirstError error;
  for (Lane* lane : lanes()) error.keep(lane->close());
  error.keep(streams_.close());
  return error.take();
}

Status Transfers::start_log() {
  FirstError error;
  for (Lane* lane : lanes()) error.keep(lane->log().start());
  return error.take();
}

std::vector<Transfer> Transfers::take_log(std::size_t& left_out) {
  std::vector<Transfer> all;
  for (Lane* lane : lanes())
    for (const Transfer& transfer : lane->log().take(left_out)) all.push_back(transfer);
  return all;
}

std::uint64_t Transfers::failures() {
  std::uint64_t count = 0;
  for (Lane* lane : lanes()) count += lane->failures();
  return count;
}

// Discards take less time than transfers, so they are waited for first.
Status Transfers::wait_for_room(Lane& lane, std::size_t allowed) {
  if (!state_.mapped()) return out_.make_wait(lane, out_.until(allowed));
  const std::size_t out = out_.under_way();
  UMEM_RETURN_IF_ERROR(drops_.make_wait(lane, drops_.until(allowed - std::min(out, allowed))));
  return out > allowed ? out_.make_wait(lane, out_.until(allowed)) : Status();
}

const std::vector<managed::MemSpan>& Transfers::spans_of(const std::vector<RangeId>& ids) {
  spans_.clear();
  for (RangeId id : ids) spans_.push_back(state_.span(id));
  return spans_;
}

// Adds an event after all work on the unit's own stream so far to `events_`.
Status Transfers::after_home(RangeId id) {
  return streams_.after_all(state_.ledger.at(id).stream, state_.ledger.now(), events_);
}

// Adds events after the unit's last use on each stream that used it.
Status Transfers::after_uses(RangeId id) {
  const Unit& unit = state_.ledger.at(id);
  return streams_.after(unit.used_on | streams_.bit(unit.stream), unit.last_use,
                        state_.ledger.now(), events_, state_.mapped() != nullptr);
}

Status Transfers::after_uses_away(const std::vector<RangeId>& ids) {
  for (RangeId id : ids) {
    const Unit& unit = state_.ledger.at(id);
    if (unit.used_away) UMEM_RETURN_IF_ERROR(after_uses(id));
    if (unit.segment) UMEM_RETURN_IF_ERROR(after_home(id));  // also by ops that are not over
  }
  return {};
}

// Adds an event after the work that the stream had when the unit's last block was freed. Later work
// does not use the bytes, so a busy stream is not waited for.
Status Transfers::after_death(RangeId id) {
  const Unit& unit = state_.ledger.at(id);
  return streams_.after_time(unit.stream, unit.death, state_.ledger.now(), events_);
}

// After the last uses of dead and live units.
Status Transfers::after_deaths(const std::vector<RangeId>& ids) {
  for (RangeId id : ids)
    UMEM_RETURN_IF_ERROR(state_.ledger.live(id) || state_.ledger.at(id).death == 0
                             ? after_home(id)
                             : after_death(id));
  return {};
}

// Likewise for several units' streams, once per stream.
Status Transfers::after_homes(const std::vector<RangeId>& ids) {
  homes_.clear();
  for (RangeId id : ids) {
    const cu::CUstream home = state_.ledger.at(id).stream;
    if (std::find(homes_.begin(), homes_.end(), home) != homes_.end()) continue;
    homes_.push_back(home);
    UMEM_RETURN_IF_ERROR(after_home(id));
  }
  return {};
}

Status Transfers::bring_in(const std::vector<RangeId>& ids, const cu::CUstream* consumer,
                           bool copies) {
  // The dead bytes that make room for it must be dropped first: of mapped memory no more than
  // `wait_for_room` says.
  if (!state_.mapped()) UMEM_RETURN_IF_ERROR(local_.make_wait(in_, last_discard_));
  for (RangeId id : ids) UMEM_RETURN_IF_ERROR(out_.make_wait(in_, state_.ledger.at(id).departure));
  for (RangeId id : ids)
    if (state_.mapped())
      UMEM_RETURN_IF_ERROR(drops_.make_wait(in_, state_.ledger.at(id).populated));
  events_.clear();
  // Uses on the host must be over. The driver sees to that where it moves the bytes.
  if (state_.mapped()) UMEM_RETURN_IF_ERROR(after_uses_away(ids));
  Result<Ticket> ticket = in_.submit(Verb::kBringIn, spans_of(ids), events_, copies);
  if (!ticket.ok()) return ticket.take_status();
  for (RangeId id : ids) {
    state_.attach(id);
    state_.ledger.set_arrival(id, ticket.value());
  }
  return consumer ? await(ticket.value(), 0, *consumer) : Status();
}

Status Transfers::make_usable(RangeId id, managed::Where where) {
  const Unit& unit = state_.ledger.at(id);
  one_.assign(1, id);
  UMEM_RETURN_IF_ERROR(out_.make_wait(in_, unit.departure));
  UMEM_RETURN_IF_ERROR(drops().make_wait(in_, last_discard_));
  events_.clear();
  Result<Ticket> usable = in_.submit(
      where == managed::Where::kHost ? Verb::kUseOnHost : Verb::kBringIn, spans_of(one_), events_);
  if (!usable.ok()) return usable.take_status();
  state_.ledger.set_arrival(id, usable.value());
  UMEM_RETURN_IF_ERROR(in_.outcome(usable.value()));
  return where == managed::Where::kHost ? Status() : await(usable.value(), 0, unit.stream);
}

void Transfers::finish_issuing() {
  for (Lane* lane : lanes()) lane->issue_until(lane->last());
}

Status Transfers::finish() {
  finish_issuing();
  const CallScope scope(state_.table, state_.place);
  return driver::check(state_.table.cuCtxSynchronize(), driver::Entry::cuCtxSynchronize);
}

Status Transfers::populate(RangeId id) {
  const Unit& unit = state_.ledger.at(id);
  // A prefetch concurrent with a discard is undefined: wait for moves of these bytes first.
  UMEM_RETURN_IF_ERROR(out_.make_wait(local_, unit.departure));
  UMEM_RETURN_IF_ERROR(in_.make_wait(local_, unit.arrival));
  if (state_.mapped())
    UMEM_RETURN_IF_ERROR(drops_.make_wait(local_, std::max(unit.populated, last_parts_)));
  events_.clear();
  if (unit.death > 0) UMEM_RETURN_IF_ERROR(after_death(id));
  one_.assign(1, id);
  const Verb verb = unit.death > 0 ? Verb::kPopulate : Verb::kPopulateFresh;
  Result<Ticket> ticket = local_.submit(verb, spans_of(one_), events_);
  if (!ticket.ok()) return ticket.take_status();
  state_.attach(id);
  state_.ledger.set_populated(id, state_.mapped() ? 0 : ticket.value());
  return await(0, unit.populated, unit.stream);
}

Result<Ticket> Transfers::submit_discard(const std::vector<managed::MemSpan>& spans, Ticket arrival,
                                         Ticket departure) {
  UMEM_RETURN_IF_ERROR(out_.make_wait(drops(), departure));
  UMEM_RETURN_IF_ERROR(in_.make_wait(drops(), arrival));
  Result<Ticket> ticket = drops().submit(Verb::kDiscard, spans, events_);
  if (ticket.ok()) last_discard_ = ticket.value();
  return ticket;
}

Status Transfers::discard(const std::vector<RangeId>& ids) {
  events_.clear();
  UMEM_RETURN_IF_ERROR(state_.mapped() ? after_deaths(ids) : after_homes(ids));
  Ticket departure = 0, arrival = 0;
  for (RangeId id : ids) {
    departure = std::max(departure, state_.ledger.at(id).departure);
    arrival = std::max(arrival, state_.ledger.at(id).arrival);
  }
  Result<Ticket> ticket = submit_discard(spans_of(ids), arrival, departure);
  if (!ticket.ok()) return ticket.take_status();
  for (RangeId id : ids)
    if (state_.mapped()) state_.ledger.set_populated(id, ticket.value());
  return {};
}

Status Transfers::discard(const std::vector<managed::MemSpan>& spans, cu::CUstream stream,
                          Ticket arrival, Ticket departure) {
  events_.clear();
  UMEM_RETURN_IF_ERROR(streams_.after_all(stream, state_.ledger.now(), events_));
  Result<Ticket> ticket = submit_discard(spans, arrival, departure);
  if (!ticket.ok()) return ticket.take_status();
  last_parts_ = ticket.value();
  return {};
}

Result<bool> Transfers::discard_live(RangeId id, managed::MemSpan part, cu::CUstream stream) {
  const Unit unit = state_.ledger.at(id);
  events_.clear();
  UMEM_RETURN_IF_ERROR(after_home(id));
  UMEM_RETURN_IF_ERROR(streams_.after_all(stream, state_.ledger.now(), events_));
  UMEM_RETURN_IF_ERROR(streams_.after(unit.used_on, unit.last_use, state_.ledger.now(), events_,
                                      state_.mapped() != nullptr));
  Result<Ticket> ticket = submit_discard({part}, unit.arrival, unit.departure);
  if (!ticket.ok()) return ticket.take_status();
  if (!local_.can_discard()) return false;          // the driver has just reported it
  state_.ledger.set_populated(id, ticket.value());  // the next use waits for it
  return true;
}

Status Transfers::send_back(const std::vector<RangeId>& ids, bool copies) {
  for (Verb verb : {Verb::kSendOut, Verb::kDrop}) {
    group_.clear();
    for (RangeId id : ids)
      if (state_.ledger.at(id).read_mostly == (verb == Verb::kDrop)) group_.push_back(id);
    const bool all = copies && verb == Verb::kSendOut;  // a drop leaves what the host has
    if (!group_.empty()) UMEM_RETURN_IF_ERROR(submit_out(verb, group_, all));
  }
  return {};
}

Status Transfers::submit_out(Verb verb, const std::vector<RangeId>& ids, bool copies) {
  events_.clear();
  for (RangeId id : ids) {
    const Unit& unit = state_.ledger.at(id);
    UMEM_RETURN_IF_ERROR(after_uses(id));
    // Units that no op waited for may still be on their way in, or being populated.
    if (unit.prefetched_unused || state_.asynchronous() || state_.mapped())
      UMEM_RETURN_IF_ERROR(in_.make_wait(out_, unit.arrival));
    UMEM_RETURN_IF_ERROR(drops().make_wait(out_, unit.populated));
  }
  Result<Ticket> ticket = out_.submit(verb, spans_of(ids), events_, copies);
  if (!ticket.ok()) return ticket.take_status();
  for (RangeId id : ids) state_.ledger.set_departure(id, ticket.value());
  return {};
}

Status Transfers::send_discarded(const std::vector<RangeId>& ids) {
  UMEM_RETURN_IF_ERROR(drops().make_wait(out_, last_discard_));
  return submit_out(Verb::kSendOut, ids);
}

Result<Ticket> Transfers::send_discarded(const std::vector<managed::MemSpan>& spans) {
  UMEM_RETURN_IF_ERROR(drops().make_wait(out_, last_discard_));
  events_.clear();
  return out_.submit(Verb::kSendOut, spans, events_);
}

Status Transfers::await(Ticket arrival, Ticket populated, cu::CUstream stream) {
  if (!streams_.behind(stream, arrival, populated)) return {};
  const CallScope scope(state_.table, state_.place);
  if (arrival > streams_.awaited(stream)) {
    UMEM_RETURN_IF_ERROR(in_.make_wait(stream, arrival));
    streams_.set_awaited(stream, arrival);
  }
  if (populated > streams_.awaited_local(stream)) {
    UMEM_RETURN_IF_ERROR(drops().make_wait(stream, populated));
    streams_.set_awaited_local(stream, populated);
  }
  return {};
}

}  // namespace umem::engine
