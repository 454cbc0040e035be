// The engine's moves: what is submitted to the lanes, after what, and what the ledger says of it.
#include <algorithm>
#include <utility>

#include "residency/engine.h"

namespace umem::residency {
namespace {

using driver::CallScope;

constexpr std::size_t kMostAhead = 256 * MiB;

}  // namespace

// What the unit's own stream has been given so far, so as to come after it, into `events_`. A mark
// of some ops ago would not do: an op's scratch memory is freed while it runs.
Status Engine::after_home(RangeId id) {
  const cu::CUstream home = ledger_.at(id).stream;
  if (driver::capturing(table_, place_, home))
    return {Code::kBadState, "the stream of the bytes is being captured"};
  return streams_.after_all(home, ledger_.now(), events_);
}

// The lane waits until what is on its way out leaves room for what is resident. The room of dead
// bytes is there at once: they go before anything is waited for.
Status Engine::wait_for_room(Lane& lane) {
  if (ledger_.dead_bytes() > 0 && local_.can_discard()) discard_dead(out_.under_way());
  const std::size_t full = std::min(taken(), limits_.budget_bytes);
  return out_.make_wait(lane, out_.until(limits_.budget_bytes - full));
}

Status Engine::populate(RangeId id) {
  UMEM_RETURN_IF_ERROR(wait_for_room(local_));
  const Unit& unit = ledger_.at(id);
  // A prefetch beside a discard is undefined: what is still going out or coming in goes first.
  UMEM_RETURN_IF_ERROR(out_.make_wait(local_, unit.departure));
  UMEM_RETURN_IF_ERROR(in_.make_wait(local_, unit.arrival));
  // The range may have been freed by work that its stream still holds.
  events_.clear();
  UMEM_RETURN_IF_ERROR(after_home(id));
  one_.assign(1, id);
  Result<Ticket> ticket = local_.submit(Verb::kPopulate, spans_of(one_), events_);
  if (!ticket.ok()) return ticket.take_status();
  ledger_.set_populated(id, ticket.value());
  return await(0, ticket.value(), unit.stream);
}

Status Engine::discard(const std::vector<RangeId>& ids) {
  events_.clear();
  for (RangeId id : ids) {
    UMEM_RETURN_IF_ERROR(after_home(id));
    UMEM_RETURN_IF_ERROR(out_.make_wait(local_, ledger_.at(id).departure));
    UMEM_RETURN_IF_ERROR(in_.make_wait(local_, ledger_.at(id).arrival));
  }
  Result<Ticket> ticket = local_.submit(Verb::kDiscard, spans_of(ids), events_);
  if (!ticket.ok()) return ticket.take_status();
  last_discard_ = ticket.value();
  return {};
}

// Drops dead units, oldest first, until `bytes` more fit or none is left.
void Engine::discard_dead(std::size_t bytes) {
  if (!local_.can_discard()) {
    if (ledger_.dead_bytes() > 0) release_cached_();
    return;
  }
  dropped_.clear();
  while (!fits(bytes) && ledger_.oldest_dead() != kNoRange) {
    const RangeId id = ledger_.oldest_dead();
    dropped_.push_back(id);
    ledger_.drop(id);
  }
  if (Status status = dropped_.empty() ? Status() : discard(dropped_); !status.ok()) {
    for (RangeId id : dropped_) ledger_.set_state(id, State::kDead);
    dropped_.clear();
    note(status);
  }
  for (RangeId id : dropped_) counters_.bytes_discarded += ledger_.at(id).bytes;
  drop_shared(bytes);
  if (!local_.can_discard()) release_cached_();  // the driver has just said so
}

// Moves the units out after their last use.
Status Engine::send_back(const std::vector<RangeId>& ids) {
  for (Verb verb : {Verb::kSendOut, Verb::kDrop}) {
    group_.clear();
    for (RangeId id : ids)
      if (ledger_.at(id).read_mostly == (verb == Verb::kDrop)) group_.push_back(id);
    if (!group_.empty()) UMEM_RETURN_IF_ERROR(submit_out(verb, group_));
  }
  return {};
}

Status Engine::submit_out(Verb verb, const std::vector<RangeId>& ids) {
  events_.clear();
  for (RangeId id : ids) {
    const Unit& unit = ledger_.at(id);
    UMEM_RETURN_IF_ERROR(streams_.after(unit.used_on | streams_.bit(unit.stream), unit.last_use,
                                        ledger_.now(), events_));
    // What no op has waited for may still be on its way in, or be populated.
    if (unit.prefetched_unused || asynchronous())
      UMEM_RETURN_IF_ERROR(in_.make_wait(out_, unit.arrival));
    UMEM_RETURN_IF_ERROR(local_.make_wait(out_, unit.populated));
  }
  Result<Ticket> ticket = out_.submit(verb, spans_of(ids), events_);
  if (!ticket.ok()) return ticket.take_status();
  for (RangeId id : ids) ledger_.set_departure(id, ticket.value());
  return {};
}

Status Engine::send_out(const std::vector<RangeId>& victims) {
  moved_.clear();
  for (RangeId id : victims) {
    // In use by another thread's op, or no room on the host: stays.
    const Unit& unit = ledger_.at(id);
    if (unit.state != State::kDevice || unit.pins > 0 || !host_has_room(id)) continue;
    moved_.push_back(id);
    if (unit.prefetched_unused) counters_.prefetched_unused_bytes += unit.bytes;
    ledger_.set_state(id, State::kHost);
  }
  if (moved_.empty()) return {};
  if (Status status = send_back(moved_); !status.ok()) {
    for (RangeId id : moved_) ledger_.set_state(id, State::kDevice);
    return status;
  }
  counters_.evictions += moved_.size();
  for (RangeId id : moved_)
    if (!ledger_.at(id).clean) counters_.bytes_out += ledger_.at(id).bytes;
  return {};
}

// True when `bytes` more fit into the budget; makes what room there is in any case.
bool Engine::make_room(std::size_t bytes) {
  if (fits(bytes)) return true;
  const std::size_t wanted = std::min(bytes, share());
  discard_dead(wanted);
  if (!fits(wanted) && !preferred_.empty()) evict_preferred(wanted);
  if (!fits(wanted)) {
    victims_.clear();
    policy_->victims(view(), taken() + wanted - limits_.budget_bytes, victims_);
    note(send_out(victims_));
    if (policy_->follows())
      for (RangeId id : victims_)
        if (ledger_.at(id).state == State::kHost) policy_->evicted(id);
  }
  return fits(bytes);
}

void Engine::evict_preferred(std::size_t wanted) {
  const View now = view();
  victims_.clear();
  std::size_t left = taken() + wanted - limits_.budget_bytes;
  for (RangeId id : std::exchange(preferred_, {})) {
    if (left == 0) break;
    const bool leaves = ledger_.has(id) && now.evictable(id) &&
                        std::find(victims_.begin(), victims_.end(), id) == victims_.end();
    if (!leaves) {
      ++counters_.advice_ignored;
      continue;
    }
    victims_.push_back(id);
    left -= std::min(left, ledger_.at(id).bytes);
  }
  note(send_out(victims_));
}

// Starts evicting before room is short, where that happens beside compute.
void Engine::evict_ahead() {
  if (!asynchronous()) return;
  const std::size_t ahead = std::min(limits_.budget_bytes / 16, kMostAhead);
  if (!fits(ahead)) make_room(ahead);
}

// The stream works from here on on what came and was populated so.
Status Engine::await(Ticket arrival, Ticket populated, cu::CUstream stream) {
  if (!streams_.behind(stream, arrival, populated)) return {};
  const CallScope scope(table_, place_);
  if (arrival > streams_.awaited(stream)) {
    UMEM_RETURN_IF_ERROR(in_.make_wait(stream, arrival));
    streams_.set_awaited(stream, arrival);
  }
  if (populated > streams_.awaited_local(stream)) {
    UMEM_RETURN_IF_ERROR(local_.make_wait(stream, populated));
    streams_.set_awaited_local(stream, populated);
  }
  return {};
}

// Without a consumer nobody waits for the bytes yet.
Status Engine::fetch(const std::vector<RangeId>& ids, const cu::CUstream* consumer) {
  std::size_t need = 0;
  for (RangeId id : ids) need += ledger_.at(id).bytes;
  make_room(need);
  moved_.clear();
  for (RangeId id : ids) {
    // An op that needs more than the budget: what does not fit comes by faults.
    if (!fits(ledger_.at(id).bytes)) continue;
    const bool data = ledger_.at(id).state == State::kHost;
    if (data) counters_.bytes_in += ledger_.at(id).bytes;
    if (data && ledger_.at(id).read_mostly) ledger_.set_clean(id);
    ledger_.set_state(id, State::kDevice);
    moved_.push_back(id);
  }
  counters_.prefetches += moved_.size();
  if (moved_.empty()) return {};
  const auto bring = [&]() -> Status {
    UMEM_RETURN_IF_ERROR(wait_for_room(in_));
    // And until the dead bytes are dropped in whose room it comes.
    UMEM_RETURN_IF_ERROR(local_.make_wait(in_, last_discard_));
    for (RangeId id : moved_) UMEM_RETURN_IF_ERROR(out_.make_wait(in_, ledger_.at(id).departure));
    events_.clear();
    Result<Ticket> ticket = in_.submit(Verb::kBringIn, spans_of(moved_), events_);
    if (!ticket.ok()) return ticket.take_status();
    for (RangeId id : moved_) ledger_.set_arrival(id, ticket.value());
    return consumer ? await(ticket.value(), 0, *consumer) : Status();
  };
  Status status = bring();
  if (!status.ok())  // on the host for all we know; faults bring it
    for (RangeId id : moved_) ledger_.set_state(id, State::kHost);
  return status;
}

}  // namespace umem::residency
