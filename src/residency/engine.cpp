#include "residency/engine.h"

#include <algorithm>
#include <string>
#include <utility>

#include "backing/mover.h"
#include "base/format.h"

namespace umem::residency {

using driver::CallScope;

Engine::Engine(const driver::Table& table, const backing::RangeTable& ranges, driver::Place place,
               bool managed, Limits limits, std::unique_ptr<Policy> policy,
               std::function<void()> release_cached)
    : table_(table),
      ranges_(ranges),
      place_(place),
      managed_(managed),
      in_(table, place, false),
      out_(table, place, asynchronous()),
      local_(table, place, false),
      streams_(table, place),
      limits_(limits),
      policy_(std::move(policy)),
      release_cached_(std::move(release_cached)) {}

Status Engine::open() {
  const CallScope scope(table_, place_);
  UMEM_RETURN_IF_ERROR(in_.open());
  UMEM_RETURN_IF_ERROR(local_.open());
  return out_.open();
}

Status Engine::close() {
  const CallScope scope(table_, place_);
  FirstError error;
  error.keep(out_.close());
  error.keep(in_.close());
  error.keep(local_.close());
  error.keep(streams_.close());
  return error.take();
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

Status Engine::check_host(std::size_t bytes) {
  const std::size_t host = limits_.host_budget_bytes;
  if (host > 0 && ledger_.live_bytes() + bytes > limits_.budget_bytes + host)
    return {Code::kOutOfHostMemory, "live bytes would exceed the budget and the host budget"};
  const auto too_large = [&] {
    return host > 0 && bytes > limits_.budget_bytes && ledger_.host_bytes() + bytes > host;
  };
  if (too_large()) release_cached_();
  if (!too_large()) return {};
  return {Code::kOutOfHostMemory,
          "the block exceeds the budget, and the host budget has no room for all of it"};
}

Status Engine::admit(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family,
                     cu::CUstream stream) {
  if (!managed_) return admit_unmanaged(id, bytes, segment, tag, family);
  UMEM_RETURN_IF_ERROR(check_host(bytes));
  if (ranges_.whole(id)) {  // nearly always
    UMEM_RETURN_IF_ERROR(admit_piece(id, bytes, segment, tag, family, stream));
    if (policy_->follows()) policy_->admitted(view(), id);
    return {};
  }
  admitted_.clear();
  Status status;
  ranges_.each_piece(id, [&](RangeId piece) {
    const std::size_t size = ranges_.piece_bytes(piece, bytes);
    if (!status.ok() || size == 0) return;
    status = admit_piece(piece, size, segment, tag, family, stream);
    if (!status.ok()) return;
    ledger_.pin(piece);  // the next one must not drive it out
    admitted_.push_back(piece);
  });
  for (RangeId piece : admitted_) ledger_.unpin(piece);
  if (!status.ok()) {
    for (RangeId piece : admitted_) retire_piece(piece);
    return status;
  }
  if (policy_->follows())
    for (RangeId piece : admitted_) policy_->admitted(view(), piece);
  return {};
}

Status Engine::admit_piece(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family,
                           cu::CUstream stream) {
  if (shared_.holds(ranges_[id].base)) return admit_shared(id, bytes, tag, family, stream);
  const bool dead = ledger_.has(id) && ledger_.at(id).state == State::kDead;
  if (dead && ledger_.at(id).bytes == bytes) {
    // Waited for already, but where the wait had failed: a discard may still be under way.
    UMEM_RETURN_IF_ERROR(await(ledger_.at(id).arrival, ledger_.at(id).populated, stream));
    ledger_.revive(id, tag, family);
    return {};
  }
  const CallScope scope(table_, place_);
  const bool captured = quiet(stream);
  if (dead && !captured) {
    // Another size: pages that the new block does not cover would stay behind unaccounted.
    one_.assign(1, id);
    UMEM_RETURN_IF_ERROR(discard(one_));
  }
  ledger_.add(id, bytes, segment, tag, family);
  ledger_.set_stream(id, stream);
  return captured ? Status() : settle(id, false, stream);
}

// Room for a new block's unit, and its pages on the device.
Status Engine::settle(RangeId id, bool had_frames, cu::CUstream stream) {
  const std::size_t bytes = ledger_.at(id).bytes;
  if (!active() || bytes > limits_.budget_bytes || !make_room(bytes)) {
    one_.assign(1, id);  // faults will bring what fits, beside what is accounted for
    if (had_frames) UMEM_RETURN_IF_ERROR(discard(one_));
    return local_.make_wait(stream, last_discard_);
  }
  ledger_.set_state(id, State::kDevice);
  if (Status status = populate(id); !status.ok()) {
    ledger_.set_state(id, State::kVoid);
    return status;
  }
  ledger_.pin(id);  // nobody has used it yet
  evict_ahead();
  ledger_.unpin(id);
  return {};
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
  ranges_.each_piece(id, [&](RangeId piece) {
    if (ledger_.has(piece)) retire_piece(piece);
  });
}

void Engine::retire_piece(RangeId id) {
  const State state = ledger_.at(id).state;
  if (state == State::kDead || state == State::kGone) return;
  policy_->retired(id);
  if (ledger_.at(id).read_mostly) note(read_mostly(id, false));  // the next owner may write
  if (shared_.holds(ranges_[id].base)) return retire_shared(id);
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
  ranges_.each_piece(id, [&](RangeId piece) {
    if (!ledger_.has(piece)) return;
    out_.issue_until(ledger_.at(piece).departure);  // not after its addresses have gone
    ledger_.remove(piece);
  });
}

bool Engine::in_use(RangeId id) const {
  bool found = false;
  ranges_.each_piece(id, [&](RangeId piece) {
    found = found || (ledger_.has(piece) && ledger_.at(piece).pins > 0);
  });
  return found;
}

void Engine::begin_use(const RangeId* ids, std::size_t count, cu::CUstream stream) {
  wanted_.clear();
  Ticket newest = 0, populated = 0;
  for (std::size_t i = 0; i < count; ++i) {
    ledger_.pin(ids[i]);
    const Unit& unit = ledger_.at(ids[i]);
    newest = std::max(newest, unit.arrival);
    populated = std::max(populated, unit.populated);
    if (away(ids[i]) && unit.pins == 1) wanted_.push_back(ids[i]);
  }
  if (!active()) return;
  const bool late = streams_.behind(stream, newest, populated);
  if ((!wanted_.empty() || late) && !quiet(stream)) {
    const CallScope scope(table_, place_);
    if (late) note(await(newest, populated, stream));  // for another stream, or by a hint
    if (!wanted_.empty()) note(fetch(wanted_, &stream));
  }
  // What died since the last op has made room: what comes in now comes beside this op.
  if (policy_->follows()) carry_out(stream);
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
  if (asynchronous() && !fits(limits_.budget_bytes / 4)) {  // evictions are near
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

Status Engine::set_limits(Limits limits) {
  const CallScope scope(table_, place_);
  if (const Status room = check_holds(0, limits.budget_bytes); !room.ok())
    return {room.code(), "the budget cannot be that low: " + room.message()};
  const Limits previous = std::exchange(limits_, limits);
  if (!managed_) return {};
  if (active()) make_room(0);
  // Memory outside of umem's may exceed any budget: it does not keep the budget from being set.
  if (!active() || ledger_.resident_bytes() <= share()) return {};
  limits_ = previous;
  return {Code::kOutOfDeviceMemory,
          "the budget cannot be lowered: running ops hold " + format_bytes(ledger_.pinned_bytes()) +
              ", the program excluded what is on the device (umem.exclude), or the host budget is "
              "full"};
}

void Engine::set_outside_bytes(std::size_t bytes) {
  limits_.outside_bytes = bytes;
  if (!active()) return;
  const CallScope scope(table_, place_);
  make_room(0);
}

void Engine::set_policy(std::unique_ptr<Policy> policy) {
  const bool was_active = active();
  copied_.clear();
  for (RangeId id = 1; id < ledger_.capacity(); ++id) end_copy(id);
  policy_ = std::move(policy);
  if (was_active == active()) return;
  const CallScope scope(table_, place_);
  if (!active()) {
    // From here on the driver moves pages as it likes, and the ledger cannot know where they are.
    while (ledger_.oldest_resident() != kNoRange)
      ledger_.set_state(ledger_.oldest_resident(), State::kVoid);
    while (ledger_.oldest_dead() != kNoRange)
      ledger_.set_state(ledger_.oldest_dead(), State::kGone);
    return lose_track_of_shared(false);
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
  lose_track_of_shared(true);
  if (!moved_.empty()) note(send_back(moved_));
}

}  // namespace umem::residency
