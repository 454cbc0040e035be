#include "residency/engine.h"

#include <algorithm>
#include <string>
#include <utility>

namespace umem::residency {

Engine::Engine(const driver::Table& table, const backing::RangeTable& ranges, int device,
               Limits limits, std::unique_ptr<Policy> policy, std::function<void()> release_cached)
    : ranges_(ranges),
      lanes_(table, device),
      limits_(limits),
      policy_(std::move(policy)),
      release_cached_(std::move(release_cached)) {}

bool Engine::away(RangeId id) const {
  const State state = ledger_.at(id).state;
  return state == State::kHost || state == State::kVoid;
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

Status Engine::admit(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family) {
  const bool dead = ledger_.has(id) && ledger_.at(id).state == State::kDead;
  const std::size_t host = limits_.host_budget_bytes;
  if (host > 0 && ledger_.live_bytes() + bytes > limits_.budget_bytes + host)
    return {Code::kOutOfHostMemory, "live bytes would exceed the budget and the host budget"};
  if (host > 0 && bytes > limits_.budget_bytes && ledger_.host_bytes() + bytes > host)
    return {Code::kOutOfHostMemory,
            "the block exceeds the budget, and the host budget has no room for all of it"};
  if (dead && ledger_.at(id).bytes == bytes) {
    ledger_.revive(id, tag, family);
    return {};
  }
  if (dead) {
    // Another size: pages that the new block does not cover would stay behind unaccounted.
    spans_.assign(1, span(id));
    UMEM_RETURN_IF_ERROR(lanes_.discard(spans_, compute_));
  }
  ledger_.add(id, bytes, segment, tag, family);
  if (!active() || bytes > limits_.budget_bytes || !make_room(bytes))
    return lanes_.settle(compute_);  // faults will bring what fits
  ledger_.set_state(id, State::kDevice);
  spans_.assign(1, span(id));
  return lanes_.populate(spans_, compute_);
}

void Engine::prepare(RangeId id) {
  if (active() && away(id)) note(fetch({id}));
}

void Engine::retire(RangeId id) {
  const State state = ledger_.at(id).state;
  if (state == State::kDead || state == State::kGone) return;
  if (state == State::kDevice) {
    ledger_.set_state(id, State::kDead);
    return;
  }
  if (state == State::kHost) counters_.bytes_discarded += ledger_.at(id).bytes;
  if (state == State::kVoid && active()) {  // drop what faults left on the device
    spans_.assign(1, span(id));
    note(lanes_.discard(spans_, compute_));
  }
  ledger_.set_state(id, State::kGone);
}

void Engine::forget(RangeId id) {
  if (ledger_.has(id)) ledger_.remove(id);
}

// Drops dead units, oldest first, until `bytes` more fit or none is left.
void Engine::discard_dead(std::size_t bytes) {
  if (!lanes_.can_discard()) {
    if (ledger_.dead_bytes() > 0) release_cached_();
    return;
  }
  spans_.clear();
  while (!fits(bytes) && ledger_.oldest_dead() != kNoRange) {
    const RangeId id = ledger_.oldest_dead();
    spans_.push_back(span(id));
    counters_.bytes_discarded += ledger_.at(id).bytes;
    ledger_.set_state(id, State::kGone);
  }
  if (!spans_.empty()) note(lanes_.discard(spans_, compute_));
  if (!lanes_.can_discard()) release_cached_();  // the driver has just said so
}

Status Engine::send_out(const std::vector<RangeId>& victims) {
  std::vector<backing::Span>& spans = spans_;
  std::vector<RangeId> sent;
  spans.clear();
  for (RangeId id : victims) {
    // In use by another thread's op, or no room on the host: stays.
    const Unit& unit = ledger_.at(id);
    if (unit.state != State::kDevice || unit.pins > 0 || !host_has_room(id)) continue;
    spans.push_back(span(id));
    sent.push_back(id);
    if (unit.prefetched_unused) counters_.prefetched_unused_bytes += unit.bytes;
    ledger_.set_state(id, State::kHost);
  }
  if (sent.empty()) return {};
  if (Status status = lanes_.send_out(spans, compute_); !status.ok()) {
    for (RangeId id : sent) ledger_.set_state(id, State::kDevice);
    return status;
  }
  counters_.evictions += sent.size();
  for (const backing::Span& span : spans) counters_.bytes_out += span.bytes;
  return {};
}

// True when `bytes` more fit into the budget; makes what room there is in any case.
bool Engine::make_room(std::size_t bytes) {
  if (fits(bytes)) return true;
  const std::size_t wanted = std::min(bytes, limits_.budget_bytes);
  discard_dead(wanted);
  if (!fits(wanted)) {
    victims_.clear();
    policy_->victims(View{ledger_, limits_.min_swap_bytes},
                     ledger_.resident_bytes() + wanted - limits_.budget_bytes, victims_);
    note(send_out(victims_));
  }
  return fits(bytes);
}

Status Engine::fetch(const std::vector<RangeId>& ids) {
  std::size_t need = 0;
  for (RangeId id : ids) need += ledger_.at(id).bytes;
  make_room(need);
  std::vector<RangeId> fetched;
  spans_.clear();
  for (RangeId id : ids) {
    // An op that needs more than the budget: what does not fit comes by faults.
    if (!fits(ledger_.at(id).bytes)) continue;
    const bool data = ledger_.at(id).state == State::kHost;
    if (data) counters_.bytes_in += ledger_.at(id).bytes;
    ledger_.set_state(id, State::kDevice);
    spans_.push_back(span(id));
    fetched.push_back(id);
  }
  counters_.prefetches += fetched.size();
  if (fetched.empty()) return {};
  Status status = lanes_.bring_in(spans_, compute_);
  if (!status.ok())  // on the host for all we know; faults bring it
    for (RangeId id : fetched) ledger_.set_state(id, State::kHost);
  return status;
}

void Engine::begin_use(const RangeId* ids, std::size_t count) {
  wanted_.clear();
  for (std::size_t i = 0; i < count; ++i) {
    ledger_.pin(ids[i]);
    if (away(ids[i]) && ledger_.at(ids[i]).pins == 1) wanted_.push_back(ids[i]);
  }
  if (!wanted_.empty() && active()) note(fetch(wanted_));
}

void Engine::end_use(const RangeId* ids, std::size_t count) {
  wanted_.clear();
  for (std::size_t i = 0; i < count; ++i) {
    ledger_.unpin(ids[i]);
    ledger_.touch(ids[i]);
    if (away(ids[i]) && ledger_.at(ids[i]).pins == 0) wanted_.push_back(ids[i]);
  }
  if (wanted_.empty() || !active()) return;
  // Used without having been brought: faults did it, at least in part. Now that the op is over the
  // ledger gets right again: the unit stays if it fits, and goes back if it does not.
  note(fetch(wanted_));
  spans_.clear();
  for (RangeId id : wanted_) {
    if (!away(id) || !host_has_room(id)) continue;
    ledger_.set_state(id, State::kHost);
    spans_.push_back(span(id));
  }
  if (!spans_.empty()) note(lanes_.send_out(spans_, compute_));
}

Status Engine::prefetch(RangeId id) {
  if (!away(id)) return {};
  if (!active()) {
    spans_.assign(1, span(id));
    return lanes_.bring_in(spans_, compute_);
  }
  UMEM_RETURN_IF_ERROR(fetch({id}));
  if (away(id)) return {Code::kOutOfDeviceMemory, "the block does not fit beside what is in use"};
  ledger_.set_prefetched(id);
  return {};
}

Status Engine::evict(RangeId id) {
  if (ledger_.at(id).pins > 0) return {Code::kBadState, "the block is in use by a running op"};
  if (!active()) {
    spans_.assign(1, span(id));
    return lanes_.send_out(spans_, compute_);
  }
  if (ledger_.at(id).state != State::kDevice) return {};
  UMEM_RETURN_IF_ERROR(send_out({id}));
  if (ledger_.at(id).state == State::kDevice)
    return {Code::kOutOfHostMemory, "the host budget has no room for the block"};
  return {};
}

Status Engine::set_limits(Limits limits) {
  const Limits previous = std::exchange(limits_, limits);
  if (!active() || make_room(0)) return {};
  limits_ = previous;
  return {Code::kOutOfDeviceMemory, "the budget cannot be lowered: running ops hold " +
                                        std::to_string(ledger_.pinned_bytes()) +
                                        " bytes, or the host budget is full"};
}

void Engine::set_policy(std::unique_ptr<Policy> policy) {
  const bool was_active = active();
  policy_ = std::move(policy);
  if (was_active == active()) return;
  if (!active()) {
    // From here on the driver moves pages as it likes, and the ledger cannot know where they are.
    while (ledger_.oldest_resident() != kNoRange)
      ledger_.set_state(ledger_.oldest_resident(), State::kVoid);
    while (ledger_.oldest_dead() != kNoRange)
      ledger_.set_state(ledger_.oldest_dead(), State::kGone);
    return;
  }
  // And the other way round: what the driver left anywhere is brought to known places.
  std::vector<backing::Span> dead;
  spans_.clear();
  for (RangeId id = 1; id < ledger_.capacity(); ++id) {
    if (ledger_.at(id).state == State::kGone) dead.push_back(span(id));
    if (ledger_.at(id).state != State::kVoid) continue;
    ledger_.set_state(id, State::kHost);
    spans_.push_back(span(id));
  }
  if (!dead.empty()) note(lanes_.discard(dead, compute_));
  if (!spans_.empty()) note(lanes_.send_out(spans_, compute_));
}

}  // namespace umem::residency
