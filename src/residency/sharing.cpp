// The engine's part in shared pages: a block takes them over as the one before left them.
#include <algorithm>

#include "residency/engine.h"

namespace umem::residency {

using driver::CallScope;

void Engine::open_shared(std::uintptr_t base, std::size_t bytes) {
  shared_.open(base, bytes);
}

void Engine::close_shared() {
  out_.issue_until(shared_.departure);  // not after the addresses have gone
  const SharedPages::Amounts left = shared_.amounts();
  ledger_.forget_idle(left.dead, left.dropped, left.host);
  shared_.close();
}

// Where all frames are still there nothing is asked of the driver.
Status Engine::admit_shared(RangeId id, std::size_t bytes, Tag tag, Family family,
                            cu::CUstream stream) {
  const backing::Span place{ranges_[id].base, bytes};
  const SharedPages::Amounts found = shared_.count(place);
  const bool whole = found.dead == bytes;
  // Waited for already, but where the wait had failed.
  if (whole) UMEM_RETURN_IF_ERROR(await(shared_.arrival, shared_.populated, stream));
  shared_.take(place);
  shared_.stream = stream;
  ledger_.forget_idle(found.dead, found.dropped, 0);
  ledger_.add(id, bytes, false, tag, family);
  ledger_.set_stream(id, stream);
  ledger_.take_host(id, found.host);
  ledger_.set_arrival(id, shared_.arrival);
  ledger_.set_populated(id, shared_.populated);
  ledger_.set_departure(id, shared_.departure);
  if (whole) {
    ledger_.set_state(id, State::kDevice);
    return {};
  }
  const CallScope scope(table_, place_);
  return quiet(stream) ? Status() : settle(id, found.dead > 0, stream);
}

void Engine::retire_shared(RangeId id) {
  const Unit unit = ledger_.at(id);
  const backing::Span place = span(id);
  shared_.arrival = std::max(shared_.arrival, unit.arrival);
  shared_.departure = std::max(shared_.departure, unit.departure);
  shared_.populated = std::max(shared_.populated, unit.populated);
  if (unit.state == State::kHost) counters_.bytes_discarded += unit.bytes;
  if (unit.state == State::kVoid && active() && !quiet(unit.stream)) {
    const CallScope scope(table_, place_);
    one_.assign(1, id);
    note(discard(one_));  // drop what faults left on the device
  }
  const bool resident = unit.state == State::kDevice;
  ledger_.set_state(id, State::kNone);
  ledger_.give_host(id);
  shared_.give_back(place, resident, unit.host_bytes);
  if (resident) ledger_.add_idle_dead(unit.bytes);
}

// Drops dead shared pages until `bytes` more fit or none is left.
void Engine::drop_shared(std::size_t bytes) {
  if (fits(bytes) || shared_.amounts().dead == 0) return;
  spans_.clear();
  shared_.find_dead(taken() + bytes - limits_.budget_bytes, spans_);
  if (Status status = discard_spans(spans_); !status.ok()) return note(status);
  std::size_t dropped = 0;
  for (const backing::Span& span : spans_) dropped += span.bytes;
  shared_.drop(spans_);
  ledger_.drop_idle(dropped);
  counters_.bytes_discarded += dropped;
}

Status Engine::discard_spans(const std::vector<backing::Span>& spans) {
  events_.clear();
  if (driver::capturing(table_, place_, shared_.stream))
    return {Code::kBadState, "the stream of the bytes is being captured"};
  UMEM_RETURN_IF_ERROR(streams_.after_all(shared_.stream, ledger_.now(), events_));
  UMEM_RETURN_IF_ERROR(out_.make_wait(local_, shared_.departure));
  UMEM_RETURN_IF_ERROR(in_.make_wait(local_, shared_.arrival));
  Result<Ticket> ticket = local_.submit(Verb::kDiscard, spans, events_);
  if (!ticket.ok()) return ticket.take_status();
  last_discard_ = ticket.value();
  return {};
}

// What the driver did with the pages meanwhile is not known: with `drop` it loses what it has.
void Engine::lose_track_of_shared(bool drop) {
  const SharedPages::Amounts left = shared_.amounts();
  ledger_.forget_idle(left.dead, left.dropped, 0);
  spans_.clear();
  shared_.lose_track(spans_);
  if (drop && !spans_.empty()) note(discard_spans(spans_));
}

}  // namespace umem::residency
