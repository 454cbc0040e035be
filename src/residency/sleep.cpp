// Sleep and wake: the device memory of many units is given back at once, and taken again.
//
// A unit that sleeps is one that is away like any other: an op that needs it brings it in. So a
// sleep at the wrong time costs time, and never a result, but for what was to be discarded.
#include <algorithm>
#include <string>
#include <utility>

#include "base/format.h"
#include "residency/engine.h"

namespace umem::residency {

using driver::CallScope;

namespace {

bool has_tag(std::uint32_t tags, Tag tag) {
  return (tags >> static_cast<unsigned>(tag) & 1U) != 0;
}

}  // namespace

// Away still, and the same block as then.
bool Engine::asleep(const Sleeper& sleeper) const {
  return ledger_.live(sleeper.id) && ledger_.at(sleeper.id).born == sleeper.born &&
         ledger_.away(sleeper.id);
}

std::size_t Engine::asleep_bytes() const {
  std::size_t bytes = 0;
  for (const Sleeper& sleeper : sleepers_)
    if (asleep(sleeper)) bytes += ledger_.at(sleeper.id).bytes;
  return bytes;
}

// What may hold device memory, or (to be discarded) bytes on the host. Where the policy leaves all
// to the driver, nobody knows what is there.
std::vector<RangeId> Engine::sleepy(const SleepRequest& wanted) const {
  std::vector<RangeId> ids;
  for (RangeId id = 1; id < ledger_.capacity(); ++id) {
    if (!ledger_.live(id) || !has_tag(wanted.tags, ledger_.at(id).tag)) continue;
    const State state = ledger_.at(id).state;
    if (state == State::kDevice || !active() || (wanted.discard && state == State::kHost))
      ids.push_back(id);
  }
  return ids;
}

std::size_t Engine::missing_on_host(const std::vector<RangeId>& ids) const {
  std::size_t bytes = 0;
  for (RangeId id : ids) {
    const Unit& unit = ledger_.at(id);
    bytes += unit.bytes - std::min(unit.bytes, unit.host_bytes);
  }
  return bytes;
}

Status Engine::check_sleep(const SleepRequest& wanted) {
  if (!managed_)
    return {Code::kNotSupported,
            "managed memory cannot be used here, so nothing can be put to sleep"};
  const std::vector<RangeId> ids = sleepy(wanted);
  for (RangeId id : ids)
    if (ledger_.at(id).pins > 0)
      return {Code::kBadState,
              "a running op uses memory that would be put to sleep; sleep between ops, when no "
              "other thread computes"};
  const std::size_t limit = limits_.host_budget_bytes;
  if (wanted.discard || limit == 0) return {};
  const std::size_t missing = missing_on_host(ids);
  if (ledger_.host_bytes() + missing > limit) release_cached_();
  if (ledger_.host_bytes() + missing <= limit) return {};
  return {Code::kOutOfHostMemory,
          "to sleep " + format_bytes(missing) + " more of host memory are needed; the host holds " +
              format_bytes(ledger_.host_bytes()) + " of its budget of " + format_bytes(limit) +
              "; raise the host budget, or name fewer tags"};
}

Status Engine::sleep(const SleepRequest& wanted, std::size_t& bytes) {
  const CallScope scope(table_, place_);
  const std::vector<RangeId> ids = sleepy(wanted);
  const std::size_t before = ledger_.resident_bytes();
  failures_before_sleep_ = out_.failures();
  UMEM_RETURN_IF_ERROR(wanted.discard ? lose(ids) : lay_down(ids));
  UMEM_RETURN_IF_ERROR(release_shared());
  std::erase_if(sleepers_, [&](const Sleeper& sleeper) {  // `ids` ascend
    return !asleep(sleeper) || std::binary_search(ids.begin(), ids.end(), sleeper.id);
  });
  bytes = before - ledger_.resident_bytes();
  for (RangeId id : ids) {
    if (!ledger_.away(id)) continue;
    sleepers_.push_back({id, ledger_.at(id).born, wanted.number, wanted.discard});
    if (!active()) bytes += ledger_.at(id).bytes;  // at most
  }
  return {};
}

Status Engine::lay_down(const std::vector<RangeId>& ids) {
  if (ids.empty()) return {};
  if (!active()) {
    for (RangeId id : ids) ledger_.hold_host(id);
    return send_back(ids);
  }
  UMEM_RETURN_IF_ERROR(send_out(ids));
  if (policy_->follows())
    for (RangeId id : ids) policy_->evicted(id);
  return {};
}

// A discard alone leaves the memory to the driver, which counts it as used until somebody takes it.
// What is sent to the host after it frees the memory now, and is not copied; it takes host memory,
// so the host budget may leave it at the discard.
Status Engine::lose(const std::vector<RangeId>& ids) {
  if (ids.empty()) return {};
  for (RangeId id : ids)
    if (ledger_.at(id).read_mostly) UMEM_RETURN_IF_ERROR(read_mostly(id, false));
  UMEM_RETURN_IF_ERROR(discard(ids));
  std::vector<RangeId> leaving;
  for (RangeId id : ids) {
    const bool there = ledger_.at(id).state != State::kHost;
    ledger_.set_state(id, State::kVoid);
    counters_.bytes_discarded += ledger_.at(id).bytes;
    if (policy_->follows()) policy_->evicted(id);
    if (!there || !host_has_room(id)) continue;
    ledger_.hold_host(id);
    leaving.push_back(id);
  }
  if (leaving.empty()) return {};
  UMEM_RETURN_IF_ERROR(local_.make_wait(out_, last_discard_));
  return submit_out(Verb::kSendOut, leaving);
}

// Shared pages between two lives, of a range in which other blocks live: as bytes that are lost.
Status Engine::release_shared() {
  const std::size_t dead = shared_.amounts().dead;
  if (dead == 0) return {};
  std::vector<backing::Span> spans;
  shared_.find_dead(dead, spans);
  UMEM_RETURN_IF_ERROR(discard_spans(spans));
  shared_.drop(spans);
  ledger_.drop_idle(dead);
  counters_.bytes_discarded += dead;
  std::size_t missing = 0;
  for (const backing::Span& span : spans) missing += span.bytes - shared_.count(span).host;
  const std::size_t limit = limits_.host_budget_bytes;
  if (limit > 0 && ledger_.host_bytes() + missing > limit) return {};  // the driver's to take
  UMEM_RETURN_IF_ERROR(local_.make_wait(out_, last_discard_));
  events_.clear();
  Result<Ticket> ticket = out_.submit(Verb::kSendOut, spans, events_);
  if (!ticket.ok()) return ticket.take_status();
  shared_.departure = ticket.value();
  shared_.hold_host(spans);
  ledger_.send_idle(dead, missing);
  return {};
}

Status Engine::finish_sleep() {
  const CallScope scope(table_, place_);
  out_.issue_until(out_.last());
  if (out_.failures() == failures_before_sleep_) return {};
  return {Code::kDriver,
          "the driver refused to move some of the memory to the host, and it stays on the device"};
}

std::vector<Engine::Sleeper> Engine::take_sleepers(std::uint32_t tags, std::uint64_t number) {
  std::vector<Sleeper> taken;
  std::erase_if(sleepers_, [&](const Sleeper& sleeper) {
    const bool same = ledger_.live(sleeper.id) && ledger_.at(sleeper.id).born == sleeper.born;
    if (!same) return true;  // freed meanwhile
    if (number != 0 && sleeper.number != number) return false;
    if (!has_tag(tags, ledger_.at(sleeper.id).tag)) return false;
    if (asleep(sleeper)) taken.push_back(sleeper);
    return true;
  });
  std::sort(taken.begin(), taken.end(), [&](const Sleeper& a, const Sleeper& b) {
    return ledger_.at(a.id).last_use < ledger_.at(b.id).last_use;
  });
  return taken;
}

Status Engine::wake(std::uint32_t tags, std::uint64_t number, std::size_t& bytes) {
  bytes = 0;
  if (!managed_) return {};
  const CallScope scope(table_, place_);
  const std::vector<Sleeper> all = take_sleepers(tags, number);
  // Those used last are the ones to have where there is no longer room for all.
  std::size_t room = view().room_bytes;
  auto first = all.end();
  while (first != all.begin() && ledger_.at(std::prev(first)->id).bytes <= room) {
    --first;
    room -= ledger_.at(first->id).bytes;
  }
  FirstError error;
  for (auto it = first; it != all.end(); ++it) {
    error.keep(rouse(*it));
    const bool back = !active() || !away(it->id);
    bytes += back ? ledger_.at(it->id).bytes : 0;
  }
  return error.take();
}

Status Engine::rouse(const Sleeper& sleeper) {
  const RangeId id = sleeper.id;
  if (!active()) return prefetch(id);
  const std::size_t bytes = ledger_.at(id).bytes;
  if (!sleeper.discarded || ledger_.at(id).state != State::kVoid) {
    bring(id);
    return {};
  }
  if (!fits(bytes)) discard_dead(bytes);
  if (!fits(bytes)) return {};  // an op may have taken the room of dead bytes
  ledger_.set_state(id, State::kDevice);
  Status status = populate(id);
  if (!status.ok()) ledger_.set_state(id, State::kVoid);
  return status;
}

}  // namespace umem::residency
