#include "residency/engine.h"

#include <algorithm>
#include <string>
#include <utility>

#include "backing/mover.h"

namespace umem::residency {
namespace {

using driver::CallScope;

// A driver whose prefetch to the host takes a thread of its own, and time, is given a head start.
bool asynchronous(const driver::Place& place) {
  return place.context != nullptr;
}

constexpr std::size_t kMostAhead = 256 * MiB;

}  // namespace

Engine::Engine(const driver::Table& table, const backing::RangeTable& ranges, driver::Place place,
               bool managed, Limits limits, std::unique_ptr<Policy> policy,
               std::function<void()> release_cached)
    : table_(table),
      ranges_(ranges),
      place_(place),
      managed_(managed),
      in_(table, place, false),
      out_(table, place, asynchronous(place)),
      streams_(table, place),
      limits_(limits),
      policy_(std::move(policy)),
      release_cached_(std::move(release_cached)) {}

Status Engine::open() {
  const CallScope scope(table_, place_);
  UMEM_RETURN_IF_ERROR(in_.open());
  return out_.open();
}

Status Engine::close() {
  const CallScope scope(table_, place_);
  FirstError error;
  error.keep(out_.close());
  error.keep(in_.close());
  error.keep(streams_.close());
  return error.take();
}

bool Engine::away(RangeId id) const {
  const State state = ledger_.at(id).state;
  return state == State::kHost || state == State::kVoid;
}

// While a graph is captured on the stream its work is not done now, and what umem would add to it
// would be part of the graph. The replay's page faults make up for what is away then.
bool Engine::quiet(cu::CUstream stream) {
  if (!driver::capturing(table_, place_, stream)) return false;
  ++counters_.capture_skips;
  return true;
}

const std::vector<backing::Span>& Engine::spans_of(const std::vector<RangeId>& ids) {
  spans_.clear();
  for (RangeId id : ids) spans_.push_back(span(id));
  return spans_;
}

// Whether the unit may be sent out within the host budget; what dead ranges hold there goes first.
bool Engine::host_has_room(RangeId id) {
  if (limits_.host_budget_bytes == 0) return true;
  const auto room = [&] {
    const Unit& unit = ledger_.at(id);
    const std::size_t more = unit.bytes - std::min(unit.bytes, unit.host_bytes);
    return ledger_.host_bytes() + more <= limits_.host_budget_bytes;
  };
  if (room()) return true;
  release_cached_();
  return room();
}

Status Engine::admit_unmanaged(RangeId id, std::size_t bytes, bool segment, Tag tag,
                               Family family) {
  const bool dead = ledger_.has(id) && ledger_.at(id).state == State::kDead;
  const std::size_t reused = dead ? ledger_.at(id).bytes : 0;
  if (taken() - reused + bytes > limits_.budget_bytes) release_cached_();
  if (taken() - reused + bytes > limits_.budget_bytes)
    return {Code::kOutOfDeviceMemory,
            "managed memory cannot be used here, so nothing can be evicted"};
  ledger_.add(id, bytes, segment, tag, family);
  ledger_.set_state(id, State::kDevice);
  return {};
}

Status Engine::admit(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family,
                     cu::CUstream stream) {
  if (!managed_) return admit_unmanaged(id, bytes, segment, tag, family);
  const bool dead = ledger_.has(id) && ledger_.at(id).state == State::kDead;
  const std::size_t host = limits_.host_budget_bytes;
  if (host > 0 && ledger_.live_bytes() + bytes > limits_.budget_bytes + host)
    return {Code::kOutOfHostMemory, "live bytes would exceed the budget and the host budget"};
  if (host > 0 && bytes > limits_.budget_bytes && ledger_.host_bytes() + bytes > host)
    return {Code::kOutOfHostMemory,
            "the block exceeds the budget, and the host budget has no room for all of it"};
  const CallScope scope(table_, place_);
  if (dead && ledger_.at(id).bytes == bytes) {
    // Waited for already, but where the wait had failed: a discard may still be under way.
    UMEM_RETURN_IF_ERROR(await(id, stream));
    ledger_.revive(id, tag, family);
    return {};
  }
  const bool captured = quiet(stream);
  if (dead && !captured) {
    // Another size: pages that the new block does not cover would stay behind unaccounted.
    one_.assign(1, id);
    UMEM_RETURN_IF_ERROR(discard(one_));
  }
  ledger_.add(id, bytes, segment, tag, family);
  ledger_.set_stream(id, stream);
  if (captured) return {};
  if (!active() || bytes > limits_.budget_bytes || !make_room(bytes))
    return in_.make_wait(stream, in_.last());  // faults will bring what fits
  ledger_.set_state(id, State::kDevice);
  UMEM_RETURN_IF_ERROR(populate(id));
  evict_ahead();
  return {};
}

// What the unit's own stream has been given so far, so as to come after it, into `events_`. A mark
// of some ops ago would not do: an op's scratch memory is freed while it runs.
Status Engine::after_home(RangeId id) {
  const cu::CUstream home = ledger_.at(id).stream;
  if (driver::capturing(table_, place_, home))
    return {Code::kBadState, "the stream of the bytes is being captured"};
  return streams_.after(streams_.bit(home), Streams::kAll, ledger_.now(), events_);
}

// The lane in waits until what is on its way out leaves room for what is resident.
Status Engine::wait_for_room() {
  const std::size_t full = std::min(taken(), limits_.budget_bytes);
  return out_.make_wait(in_, out_.until(limits_.budget_bytes - full));
}

Status Engine::populate(RangeId id) {
  UMEM_RETURN_IF_ERROR(wait_for_room());
  const Unit& unit = ledger_.at(id);
  // A prefetch beside a discard is undefined: what is still going out goes first.
  UMEM_RETURN_IF_ERROR(out_.make_wait(in_, unit.departure));
  // The range may have been freed by work that its stream still holds.
  events_.clear();
  UMEM_RETURN_IF_ERROR(after_home(id));
  one_.assign(1, id);
  Result<Ticket> ticket = in_.submit(Verb::kPopulate, spans_of(one_), events_);
  if (!ticket.ok()) return ticket.take_status();
  ledger_.set_arrival(id, ticket.value());
  return await(id, unit.stream);
}

void Engine::prepare(RangeId id) {
  if (!active() || !away(id)) return;
  const cu::CUstream stream = ledger_.at(id).stream;
  if (quiet(stream)) return;
  const CallScope scope(table_, place_);
  one_.assign(1, id);
  note(fetch(one_, &stream));
}

void Engine::retire(RangeId id) {
  const State state = ledger_.at(id).state;
  if (state == State::kDead || state == State::kGone) return;
  if (state == State::kDevice) {
    ledger_.set_state(id, State::kDead);
    return;
  }
  if (state == State::kHost) counters_.bytes_discarded += ledger_.at(id).bytes;
  if (state == State::kVoid && active() && !quiet(ledger_.at(id).stream)) {
    const CallScope scope(table_, place_);
    one_.assign(1, id);
    note(discard(one_));  // drop what faults left on the device
  }
  ledger_.set_state(id, State::kGone);
}

void Engine::forget(RangeId id) {
  if (!ledger_.has(id)) return;
  out_.issue_until(ledger_.at(id).departure);  // not after its addresses have gone
  ledger_.remove(id);
}

Status Engine::discard(const std::vector<RangeId>& ids) {
  events_.clear();
  for (RangeId id : ids) {
    UMEM_RETURN_IF_ERROR(after_home(id));
    UMEM_RETURN_IF_ERROR(out_.make_wait(in_, ledger_.at(id).departure));
  }
  return in_.submit(Verb::kDiscard, spans_of(ids), events_).take_status();
}

// Drops dead units, oldest first, until `bytes` more fit or none is left.
void Engine::discard_dead(std::size_t bytes) {
  if (!in_.can_discard()) {
    if (ledger_.dead_bytes() > 0) release_cached_();
    return;
  }
  dropped_.clear();
  while (!fits(bytes) && ledger_.oldest_dead() != kNoRange) {
    const RangeId id = ledger_.oldest_dead();
    dropped_.push_back(id);
    counters_.bytes_discarded += ledger_.at(id).bytes;
    ledger_.drop(id);
  }
  if (!dropped_.empty()) note(discard(dropped_));
  if (!in_.can_discard()) release_cached_();  // the driver has just said so
}

// Moves the units out after their last use.
Status Engine::send_back(const std::vector<RangeId>& ids) {
  events_.clear();
  for (RangeId id : ids) {
    const Unit& unit = ledger_.at(id);
    UMEM_RETURN_IF_ERROR(streams_.after(unit.used_on | streams_.bit(unit.stream), unit.last_use,
                                        ledger_.now(), events_));
    // What no op has waited for may still be on its way in.
    if (unit.prefetched_unused) UMEM_RETURN_IF_ERROR(in_.make_wait(out_, unit.arrival));
  }
  Result<Ticket> ticket = out_.submit(Verb::kSendOut, spans_of(ids), events_);
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
  for (RangeId id : moved_) counters_.bytes_out += ledger_.at(id).bytes;
  return {};
}

// True when `bytes` more fit into the budget; makes what room there is in any case.
bool Engine::make_room(std::size_t bytes) {
  if (fits(bytes)) return true;
  const std::size_t room =
      limits_.budget_bytes - std::min(limits_.outside_bytes, limits_.budget_bytes);
  const std::size_t wanted = std::min(bytes, room);
  discard_dead(wanted);
  if (!fits(wanted)) {
    victims_.clear();
    policy_->victims(View{ledger_, limits_.min_swap_bytes}, taken() + wanted - limits_.budget_bytes,
                     victims_);
    note(send_out(victims_));
  }
  return fits(bytes);
}

// Starts evicting before room is short, where that happens beside compute.
void Engine::evict_ahead() {
  if (!asynchronous(place_)) return;
  const std::size_t ahead = std::min(limits_.budget_bytes / 16, kMostAhead);
  if (!fits(ahead)) make_room(ahead);
}

// The stream works on the unit from here on.
Status Engine::await(RangeId id, cu::CUstream stream) {
  const Ticket arrival = ledger_.at(id).arrival;
  if (arrival <= streams_.awaited(stream)) return {};
  UMEM_RETURN_IF_ERROR(in_.make_wait(stream, arrival));
  streams_.set_awaited(stream, arrival);
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
    ledger_.set_state(id, State::kDevice);
    moved_.push_back(id);
  }
  counters_.prefetches += moved_.size();
  if (moved_.empty()) return {};
  const auto bring = [&]() -> Status {
    UMEM_RETURN_IF_ERROR(wait_for_room());
    for (RangeId id : moved_) UMEM_RETURN_IF_ERROR(out_.make_wait(in_, ledger_.at(id).departure));
    events_.clear();
    Result<Ticket> ticket = in_.submit(Verb::kBringIn, spans_of(moved_), events_);
    if (!ticket.ok()) return ticket.take_status();
    for (RangeId id : moved_) ledger_.set_arrival(id, ticket.value());
    return consumer ? await(moved_.front(), *consumer) : Status();
  };
  Status status = bring();
  if (!status.ok())  // on the host for all we know; faults bring it
    for (RangeId id : moved_) ledger_.set_state(id, State::kHost);
  return status;
}

void Engine::begin_use(const RangeId* ids, std::size_t count, cu::CUstream stream) {
  wanted_.clear();
  Ticket newest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    ledger_.pin(ids[i]);
    const Unit& unit = ledger_.at(ids[i]);
    newest = std::max(newest, unit.arrival);
    if (away(ids[i]) && unit.pins == 1) wanted_.push_back(ids[i]);
  }
  if (!active()) return;
  const bool late = newest > streams_.awaited(stream);
  if ((wanted_.empty() && !late) || quiet(stream)) return;
  const CallScope scope(table_, place_);
  if (late) {  // still on its way for another stream, or by a hint
    note(in_.make_wait(stream, newest));
    streams_.set_awaited(stream, newest);
  }
  if (!wanted_.empty()) note(fetch(wanted_, &stream));
}

void Engine::end_use(const RangeId* ids, std::size_t count, cu::CUstream stream) {
  wanted_.clear();
  const std::uint32_t bit = streams_.bit(stream);
  for (std::size_t i = 0; i < count; ++i) {
    ledger_.unpin(ids[i]);
    ledger_.touch(ids[i]);
    ledger_.use_on(ids[i], bit);
    if (away(ids[i]) && ledger_.at(ids[i]).pins == 0) wanted_.push_back(ids[i]);
  }
  if (!active()) return;
  if (asynchronous(place_) && !fits(limits_.budget_bytes / 4)) {  // evictions are near
    const CallScope scope(table_, place_);
    const Status marked = streams_.mark(stream, ledger_.now());
    (void)marked;  // an eviction records its own then
  }
  if (wanted_.empty() || quiet(stream)) return;
  const CallScope scope(table_, place_);
  // Used without having been brought: faults did it, at least in part. Now that the op is over the
  // ledger gets right again: the unit stays if it fits, and goes back if it does not.
  note(fetch(wanted_, &stream));
  moved_.clear();
  for (RangeId id : wanted_) {
    if (!away(id) || !host_has_room(id)) continue;
    ledger_.set_state(id, State::kHost);
    moved_.push_back(id);
  }
  if (!moved_.empty()) note(send_back(moved_));
}

Status Engine::prefetch(RangeId id) {
  if (!managed_ || !away(id)) return {};
  const CallScope scope(table_, place_);
  one_.assign(1, id);
  if (!active()) {
    events_.clear();
    return in_.submit(Verb::kBringIn, spans_of(one_), events_).take_status();
  }
  UMEM_RETURN_IF_ERROR(fetch(one_, nullptr));
  if (away(id)) return {Code::kOutOfDeviceMemory, "the block does not fit beside what is in use"};
  ledger_.set_prefetched(id);
  return {};
}

Status Engine::evict(RangeId id) {
  if (!managed_)
    return {Code::kNotSupported, "managed memory cannot be used here, so nothing can be evicted"};
  if (ledger_.at(id).pins > 0) return {Code::kBadState, "the block is in use by a running op"};
  const CallScope scope(table_, place_);
  one_.assign(1, id);
  if (!active()) return send_back(one_);
  if (ledger_.at(id).state != State::kDevice) return {};
  UMEM_RETURN_IF_ERROR(send_out(one_));
  if (ledger_.at(id).state == State::kDevice)
    return {Code::kOutOfHostMemory, "the host budget has no room for the block"};
  return {};
}

Status Engine::read_mostly(RangeId id, bool on) {
  if (!managed_) return {};
  const CallScope scope(table_, place_);
  UMEM_RETURN_IF_ERROR(backing::advise_read_mostly(table_, span(id), on));
  ledger_.set_read_mostly(id, on);
  return {};
}

Status Engine::set_limits(Limits limits) {
  const CallScope scope(table_, place_);
  const Limits previous = std::exchange(limits_, limits);
  if (!managed_) return {};
  if (!active() || make_room(0)) return {};
  limits_ = previous;
  return {Code::kOutOfDeviceMemory, "the budget cannot be lowered: running ops hold " +
                                        std::to_string(ledger_.pinned_bytes()) +
                                        " bytes, or the host budget is full"};
}

void Engine::set_outside_bytes(std::size_t bytes) {
  limits_.outside_bytes = bytes;
  if (!active()) return;
  const CallScope scope(table_, place_);
  make_room(0);
}

void Engine::set_policy(std::unique_ptr<Policy> policy) {
  const bool was_active = active();
  policy_ = std::move(policy);
  if (was_active == active()) return;
  const CallScope scope(table_, place_);
  if (!active()) {
    // From here on the driver moves pages as it likes, and the ledger cannot know where they are.
    while (ledger_.oldest_resident() != kNoRange)
      ledger_.set_state(ledger_.oldest_resident(), State::kVoid);
    while (ledger_.oldest_dead() != kNoRange)
      ledger_.set_state(ledger_.oldest_dead(), State::kGone);
    return;
  }
  // And the other way round: what the driver left anywhere is brought to known places.
  dropped_.clear();
  moved_.clear();
  for (RangeId id = 1; id < ledger_.capacity(); ++id) {
    if (ledger_.at(id).state == State::kGone) dropped_.push_back(id);
    if (ledger_.at(id).state != State::kVoid) continue;
    ledger_.set_state(id, State::kHost);
    moved_.push_back(id);
  }
  if (!dropped_.empty()) note(discard(dropped_));
  if (!moved_.empty()) note(send_back(moved_));
}

}  // namespace umem::residency
