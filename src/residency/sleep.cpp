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

// Away still, and the same block as then. Who came for an op and left again, as by pressure, is
// away for that reason.
bool Engine::asleep(const Sleeper& sleeper) const {
  if (!ledger_.live(sleeper.id) || !ledger_.away(sleeper.id)) return false;
  const Unit& unit = ledger_.at(sleeper.id);
  return unit.born == sleeper.born && unit.arrival == sleeper.arrival;
}

bool Engine::sleeps(RangeId id) const {
  return std::any_of(sleepers_.begin(), sleepers_.end(),
                     [&](const Sleeper& sleeper) { return sleeper.id == id && asleep(sleeper); });
}

std::size_t Engine::asleep_bytes() const {
  std::size_t bytes = 0;
  for (const Sleeper& sleeper : sleepers_)
    if (asleep(sleeper)) bytes += ledger_.at(sleeper.id).bytes;
  return bytes;
}

// Those too that are away for all we know: faults may have brought them, and the driver knows what
// there is nothing to do for.
std::vector<RangeId> Engine::sleepy(const SleepRequest& wanted) const {
  std::vector<RangeId> ids;
  for (RangeId id = 1; id < ledger_.capacity(); ++id)
    if (ledger_.live(id) && has_tag(wanted.tags, ledger_.at(id).tag)) ids.push_back(id);
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
  // Who came back for an op, or is gone; who is away for another reason stays so at `wake`.
  std::erase_if(sleepers_, [&](const Sleeper& sleeper) { return !asleep(sleeper); });
  std::vector<RangeId> awake;
  for (RangeId id : ids)
    if (ledger_.at(id).state == State::kDevice || (!active() && !sleeps(id))) awake.push_back(id);
  UMEM_RETURN_IF_ERROR(wanted.discard ? lose(ids) : lay_down(ids));
  UMEM_RETURN_IF_ERROR(release_shared());
  bytes = before - ledger_.resident_bytes();
  for (RangeId id : awake) {
    if (!ledger_.away(id)) continue;
    sleepers_.push_back({id, ledger_.at(id).born, ledger_.at(id).arrival, wanted.number});
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
  std::vector<RangeId> again;
  for (RangeId id : ids)
    if (ledger_.away(id)) again.push_back(id);
  UMEM_RETURN_IF_ERROR(send_out(ids));
  if (policy_->follows())
    for (RangeId id : ids) policy_->evicted(id);
  for (RangeId id : again) ledger_.set_state(id, State::kHost);
  return again.empty() ? Status() : send_back(again);
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
    counters_.bytes_discarded += ledger_.at(id).bytes;
    if (policy_->follows()) policy_->evicted(id);
    const bool leaves = host_has_room(id);
    if (active()) ledger_.set_state(id, leaves ? State::kHost : State::kVoid);
    if (!leaves) continue;
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
  // What the program pinned comes back whoever leaves for it: holds are given so that it fits.
  const auto held = [&](const Sleeper& sleeper) { return ledger_.at(sleeper.id).holds > 0; };
  std::size_t pinned = 0;
  for (const Sleeper& sleeper : all) pinned += held(sleeper) ? ledger_.at(sleeper.id).bytes : 0;
  if (active() && pinned > 0) make_room(pinned);
  // Of the others those used last are the ones to have where there is no longer room for all.
  const std::size_t free = view().room_bytes;
  std::size_t room = free - std::min(free, pinned);
  auto first = all.end();
  for (; first != all.begin(); --first) {
    const Sleeper& last = *std::prev(first);
    if (held(last)) continue;
    if (ledger_.at(last.id).bytes > room) break;
    room -= ledger_.at(last.id).bytes;
  }
  FirstError error;
  for (auto it = all.begin(); it != all.end(); ++it) {
    if (it < first && !held(*it)) continue;
    // Not as dead bytes, whatever they were when they left: the program may have written them since
    // without umem's seeing it.
    if (active() && !held(*it)) {
      bring(it->id);
    } else {
      error.keep(prefetch(it->id));
    }
    bytes += !active() || !away(it->id) ? ledger_.at(it->id).bytes : 0;
  }
  return error.take();
}

}  // namespace umem::residency
