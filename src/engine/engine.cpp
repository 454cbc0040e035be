#include "engine/engine.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/assert.h"
#include "base/format.h"
#include "base/thread_role.h"

namespace umem::engine {

using driver::CallScope;

Engine::Engine(const driver::Table& table, const managed::RangeTable& ranges, driver::Place place,
               bool managed, const policy::Policy& policy, std::function<void()> release_cached)
    : state_{table, ranges, place, managed, {}, nullptr, nullptr, {}, {}, 0, {}},
      transfers_(state_),
      sharing_(state_, transfers_),
      zero_copy_(state_),
      moves_(state_, transfers_, sharing_, std::move(release_cached)),
      write_back_(state_, transfers_, moves_, zero_copy_),
      sleep_(state_, transfers_, moves_, sharing_, write_back_),
      hints_(state_, transfers_, moves_, write_back_) {
  state_.set_policy(policy);
}

Status Engine::open(Limits limits) {
  state_.limits = limits;
  const CallScope scope(state_.table, state_.place);
  return transfers_.open();
}

Status Engine::close() {
  const CallScope scope(state_.table, state_.place);
  return transfers_.close();
}

Status Engine::start_log() {
  const CallScope scope(state_.table, state_.place);
  return transfers_.start_log();
}

std::vector<Transfer> Engine::take_log(std::size_t& left_out) {
  const CallScope scope(state_.table, state_.place);
  return transfers_.take_log(left_out);
}

Status Engine::admit_unmanaged(RangeId id, std::size_t bytes, bool segment, Tag tag,
                               Family family) {
  const bool dead = state_.ledger.has(id) && state_.ledger.at(id).state == State::kDead;
  const std::size_t reused = dead ? state_.ledger.at(id).bytes : 0;
  if (state_.taken() - reused + bytes > state_.limits.budget_bytes) moves_.release_cached();
  if (state_.taken() - reused + bytes > state_.limits.budget_bytes)
    return {Code::kOutOfDeviceMemory, "memory is not managed here, so nothing can be evicted"};
  state_.ledger.add(id, bytes, segment, tag, family);
  state_.ledger.set_state(id, State::kDevice);
  return {};
}

std::size_t Engine::host_bytes(RangeId id) const {
  std::size_t held = 0;
  state_.ranges.each_piece(id, [&](RangeId piece) {
    if (state_.ledger.has(piece)) held += state_.ledger.at(piece).host_bytes;
  });
  return held;
}

Status Engine::check_host(RangeId id, std::size_t bytes) {
  const std::size_t host = state_.limits.host_budget_bytes;
  if (host > 0 && state_.ledger.live_bytes() + bytes > state_.limits.budget_bytes + host)
    return {Code::kOutOfHostMemory, "live bytes would exceed the budget and the host budget"};
  const std::size_t held = host_bytes(id);  // a range that is used again has it already
  const auto too_large = [&] {
    return host > 0 && bytes > state_.limits.budget_bytes &&
           state_.ledger.host_bytes() - held + bytes > host;
  };
  if (too_large()) moves_.release_cached();
  if (!too_large()) return {};
  return {Code::kOutOfHostMemory,
          "the block exceeds the budget, and the host budget has no room for all of it"};
}

Status Engine::admit(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family,
                     cu::CUstream stream) {
  if (!state_.managed) return admit_unmanaged(id, bytes, segment, tag, family);
  UMEM_RETURN_IF_ERROR(check_host(id, bytes));
  if (state_.ranges.whole(id)) {  // the common case
    UMEM_RETURN_IF_ERROR(admit_piece(id, bytes, segment, tag, family, stream));
    tell_policy(id);
    return {};
  }
  admitted_.clear();
  Status status;
  state_.ranges.each_piece(id, [&](RangeId piece) {
    const std::size_t size = state_.ranges.piece_bytes(piece, bytes);
    if (!status.ok() || size == 0) return;
    status = admit_piece(piece, size, segment, tag, family, stream);
    if (!status.ok()) return;
    state_.ledger.pin(piece);  // the next piece must not evict it
    admitted_.push_back(piece);
  });
  for (RangeId piece : admitted_) state_.ledger.unpin(piece);
  if (!status.ok()) {
    for (RangeId piece : admitted_) retire_piece(piece);
    return status;
  }
  for (RangeId piece : admitted_) tell_policy(piece);
  return {};
}

void Engine::tell_policy(RangeId admitted) {
  if (!state_.follows_plans()) return;
  if (helps_only())
    state_.planned->admitted_by_helper(state_.view(), admitted);
  else
    state_.planned->admitted(state_.view(), admitted);
}

Status Engine::admit_piece(RangeId id, std::size_t bytes, bool segment, Tag tag, Family family,
                           cu::CUstream stream) {
  if (sharing_.contains(state_.ranges[id].base)) {
    Result<std::size_t> frames = sharing_.admit(id, bytes, tag, family, stream);
    if (!frames.ok()) return frames.take_status();
    if (frames.value() == bytes) return {};
    const CallScope scope(state_.table, state_.place);
    if (!state_.skip_for_capture(stream)) return settle(id, frames.value() > 0, stream);
    state_.attach(id);  // populated by page faults of the graph's replay
    return {};
  }
  const bool dead = state_.ledger.has(id) && state_.ledger.at(id).state == State::kDead;
  // Bytes that cannot be discarded stay accounted for, also those beyond the new block.
  const bool larger = dead && state_.ledger.at(id).bytes > bytes;
  if (dead &&
      (state_.ledger.at(id).bytes == bytes || (larger && !transfers_.local().can_discard()))) {
    // Already waited for, unless the wait failed: a discard may still be under way.
    UMEM_RETURN_IF_ERROR(
        transfers_.await(state_.ledger.at(id).arrival, state_.ledger.at(id).populated, stream));
    moves_.note_failures();
    if (state_.ledger.at(id).state == State::kDead) {
      state_.ledger.revive(id, tag, family);
      return {};
    }
  }
  const CallScope scope(state_.table, state_.place);
  const bool captured = state_.skip_for_capture(stream);
  if (dead && !captured) {
    // A different size: pages beyond the new block would be unaccounted for.
    one_.assign(1, id);
    UMEM_RETURN_IF_ERROR(transfers_.discard(one_));
  }
  state_.ledger.add(id, bytes, segment, tag, family);
  state_.ledger.set_stream(id, stream);
  if (!captured) return settle(id, false, stream);
  if (state_.mapped()) return transfers_.make_usable(id, managed::Where::kDevice);
  state_.attach(id);  // populated by page faults of the graph's replay
  return {};
}

// Makes room for a new block's unit and populates its pages.
Status Engine::settle(RangeId id, bool had_frames, cu::CUstream stream) {
  const std::size_t bytes = state_.ledger.at(id).bytes;
  if (!state_.active() || bytes > state_.limits.budget_bytes || !moves_.make_room(bytes)) {
    if (state_.active()) ++state_.counters.left_out;
    one_.assign(1, id);
    if (state_.mapped()) {
      if (state_.ledger.at(id).death > 0) UMEM_RETURN_IF_ERROR(transfers_.discard(one_));
      if (use_on_host(id)) return {};
      return transfers_.make_usable(id, managed::Where::kDevice);
    }
    // Otherwise page faults bring in what fits, in addition to the accounted bytes.
    if (!use_on_host(id)) state_.attach(id);
    if (had_frames) UMEM_RETURN_IF_ERROR(transfers_.discard(one_));
    return transfers_.await_discard(stream);
  }
  state_.ledger.set_state(id, State::kDevice);
  if (Status status = moves_.populate(id); !status.ok()) {
    state_.ledger.set_state(id, State::kVoid);
    return status;
  }
  state_.ledger.pin(id);  // no op has used it yet
  moves_.drop_ahead();
  moves_.evict_ahead();
  state_.ledger.unpin(id);
  return {};
}

void Engine::prepare(RangeId id) {
  if (!state_.active() || !state_.ledger.away(id) || stays_on_host(id)) return;
  const cu::CUstream stream = state_.ledger.at(id).stream;
  if (state_.skip_for_capture(stream)) return;
  const CallScope scope(state_.table, state_.place);
  one_.assign(1, id);
  state_.count_error(moves_.fetch(one_, &stream));
  if (state_.mapped() && state_.ledger.away(id)) use_on_host(id);
}

void Engine::retire(RangeId id) {
  state_.ranges.each_piece(id, [&](RangeId piece) {
    if (state_.ledger.has(piece)) retire_piece(piece);
  });
}

void Engine::retire_piece(RangeId id) {
  const State state = state_.ledger.at(id).state;
  if (state == State::kDead || state == State::kGone) return;
  if (state_.planned) state_.planned->retired(id);
  workspaces_.retired(state_.ledger, id);
  state_.ledger.set_death(id);
  const bool later = retire_later(id);
  if (state_.ledger.at(id).read_mostly)
    state_.count_error(write_back_.advise(id, false));  // the next owner may write
  const bool in_file = state_.ledger.at(id).in_file;
  if (in_file) {  // the program may do anything with its file from now on
    const CallScope scope(state_.table, state_.place);
    one_.assign(1, id);
    state_.count_error(transfers_.discard(one_));
    state_.ledger.set_in_file(id, false);
  }
  if (sharing_.contains(state_.ranges[id].base)) return sharing_.retire(id);
  if (state == State::kDevice && !in_file) {
    state_.ledger.set_state(id, State::kDead);
    return;
  }
  if (state == State::kHost) state_.counters.bytes_discarded += state_.ledger.at(id).bytes;
  if (state == State::kVoid && !later && !in_file && state_.drops_uncounted() &&
      !state_.skip_for_capture(state_.ledger.at(id).stream)) {
    const CallScope scope(state_.table, state_.place);
    one_.assign(1, id);
    state_.count_error(transfers_.discard(one_));  // drop pages that faults brought to the device
  }
  state_.ledger.set_state(id, State::kGone);
}

// Advice waits for the driver's lock, and a discard may wait for the outbound lane's thread. True
// if the calls are left to `finish_retired`.
bool Engine::retire_later(RangeId id) {
  const Unit& unit = state_.ledger.at(id);
  const bool discard = unit.state == State::kVoid && state_.drops_uncounted();
  if (!state_.asynchronous() || !state_.managed || unit.joined || (!discard && !unit.read_mostly))
    return false;
  retired_.push_back({id, state_.span(id), unit.stream, unit.arrival, unit.departure,
                      unit.read_mostly, unit.state == State::kDevice, discard});
  if (unit.read_mostly) state_.ledger.set_read_mostly(id, false, false);
  return true;
}

void Engine::finish_all_retired() {
  const CallScope scope(state_.table, state_.place);
  for (const Retired& retired : std::exchange(retired_, {})) {
    if (retired.discard && !state_.skip_for_capture(retired.stream))
      state_.count_error(
          transfers_.discard({retired.span}, retired.stream, retired.arrival, retired.departure));
    if (!retired.read_mostly) continue;
    transfers_.out().issue_until(retired.departure);  // a drop suspends the advice meanwhile
    state_.count_error(managed::collapse_copies(
        state_.table, retired.span, retired.here ? managed::Where::kDevice : managed::Where::kHost,
        state_.place.device));
    // As after any such advice, a prefetch maps the pages on the device as writable.
    if (!state_.ledger.has(retired.id) || state_.ledger.at(retired.id).state != State::kDead)
      continue;
    one_.assign(1, retired.id);
    state_.count_error(transfers_.bring_in(one_, nullptr));
  }
}

Ticket Engine::forget(RangeId id) {
  if (state_.mapped()) transfers_.finish_issuing();
  const managed::Range& range = state_.ranges[state_.ranges[id].head];
  state_.attached.detach({range.base, range.bytes});
  std::erase_if(retired_, [&](const Retired& retired) {
    return retired.span.base - range.base < range.bytes;  // its addresses are freed
  });
  Ticket departure = 0;
  state_.ranges.each_piece(id, [&](RangeId piece) {
    if (!state_.ledger.has(piece)) return;
    departure = std::max(departure, state_.ledger.at(piece).departure);
    state_.ledger.remove(piece);
    zero_copy_.forget(piece);
    if (state_.planned) state_.planned->forgotten(piece);
  });
  return departure;
}

bool Engine::in_use(RangeId id) const {
  bool found = false;
  state_.ranges.each_piece(id, [&](RangeId piece) {
    // A block of a layout that was freed is no unit any more, and keeps its pins.
    found = found || (piece < state_.ledger.capacity() && state_.ledger.at(piece).op_pins > 0);
  });
  return found;
}

void Engine::begin_collective(const RangeId* ids, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    state_.ledger.begin_collective(
        ids[i], state_.mapped() ? state_.limits.budget_bytes : state_.limits.budget_bytes / 4);
}

bool Engine::begin_cut(RangeId id) {
  if (!state_.managed || state_.mapped()) return false;  // mapped memory moves as it was placed
  if (state_.place.captures && *state_.place.captures > 0) return false;
  bool may = true;
  const auto each_unit = [&](auto act) {
    state_.ranges.each_piece(id, [&](RangeId piece) {
      if (may && state_.ledger.has(piece)) act(piece, state_.ledger.at(piece));
    });
  };
  each_unit([&](RangeId piece, const Unit& unit) {
    may = unit.op_pins == 0 && unit.user_pins == 0 && unit.exempt == 0 &&
          (unit.tag != Tag::kWorkspace || !state_.ledger.live(piece)) && !sleep_.is_asleep(piece) &&
          !sharing_.contains(state_.ranges[piece].base);
  });
  if (may) finish_retired();
  // The engine remembers its own advice by unit.
  each_unit([&](RangeId piece, const Unit& unit) {
    if (unit.by_policy) write_back_.end(piece);
    zero_copy_.end(piece);
    may = !unit.by_policy && !zero_copy_.contains(piece);
  });
  return may;
}

void Engine::split(RangeId piece, RangeId rest, std::size_t at) {
  // The policy knows it as another unit from now on.
  if (state_.planned && state_.ledger.live(piece)) state_.planned->retired(piece);
  state_.ledger.split(piece, rest, at);
}

// Mapped memory that is used on the host by a collective, or, where it is a segment, by ops that
// are not over and use small blocks in it.
bool Engine::stays_on_host(RangeId id) const {
  const Unit& unit = state_.ledger.at(id);
  return state_.mapped() && (unit.in_collective || (unit.segment && unit.used_away));
}

// Ends the policy's advice that nothing writes them, which would cost a fault a page.
void Engine::will_write(const RangeId* ids, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const Unit& unit = state_.ledger.at(ids[i]);
    if (!unit.by_policy || state_.skip_for_capture(unit.stream)) continue;
    write_back_.end(ids[i]);
    if (state_.planned) state_.planned->written(ids[i]);
  }
}

void Engine::begin_use(const RangeId* ids, std::size_t count, cu::CUstream stream) {
  wanted_.clear();
  Ticket newest = 0, populated = 0;
  for (std::size_t i = 0; i < count; ++i) {
    state_.ledger.pin(ids[i]);
    // An op that reads it does not end a collective that reads it too.
    if (!state_.mapped()) state_.ledger.end_collective(ids[i]);
    const Unit& unit = state_.ledger.at(ids[i]);
    newest = std::max(newest, unit.arrival);
    populated = std::max(populated, unit.populated);
    if (state_.ledger.away(ids[i]) && unit.op_pins == 1 && !stays_on_host(ids[i]))
      wanted_.push_back(ids[i]);
  }
  if (!state_.active()) return;
  const bool late = transfers_.streams().behind(stream, newest, populated);
  const bool failed = moves_.note_failures();
  if ((!wanted_.empty() || late || failed) && !state_.skip_for_capture(stream)) {
    const CallScope scope(state_.table, state_.place);
    if (late)
      state_.count_error(
          transfers_.await(newest, populated, stream));  // fetched for another stream, or by a hint
    if (moves_.note_failures() || failed)                // also of what was waited for just now
      for (std::size_t i = 0; i < count; ++i)
        if (state_.ledger.away(ids[i]) && !stays_on_host(ids[i]) &&
            std::find(wanted_.begin(), wanted_.end(), ids[i]) == wanted_.end())
          wanted_.push_back(ids[i]);
    if (!wanted_.empty()) state_.count_error(moves_.fetch(wanted_, &stream));
    for (RangeId id : wanted_)
      if (state_.ledger.away(id) && (state_.mapped() || !state_.fits(state_.ledger.at(id).bytes)))
        use_on_host(id);
  }
  // Units that died since the last op have made room: fetches that start now overlap with this op.
  if (state_.follows_plans()) apply_pending(stream);
}

// False if the unit's pages come by faults: in a static layout, where later blocks would inherit
// the advice, and where the host has no room.
bool Engine::use_on_host(RangeId id) {
  const bool shared = !state_.mapped() && sharing_.contains(state_.ranges[id].base);
  if (!state_.active() || shared) return false;
  if (state_.mapped()) {  // beyond the host budget, as nothing else would make it usable
    const Status usable = transfers_.make_usable(id, managed::Where::kHost);
    state_.count_error(usable);
    if (!usable.ok()) return false;
  } else if (!moves_.fits_on_host(id)) {
    return false;
  }
  const bool noted = zero_copy_.use(id);
  if (noted && state_.ledger.at(id).state == State::kVoid)
    state_.ledger.set_state(id, State::kHost);
  if (state_.mapped()) state_.ledger.set_used_away(id);  // last: a change of state ends it
  return noted;
}

void Engine::end_use(const RangeId* ids, std::size_t count, cu::CUstream stream, bool inner) {
  wanted_.clear();
  const std::uint32_t bit = transfers_.streams().bit(stream);
  for (std::size_t i = 0; i < count; ++i) {
    state_.ledger.unpin(ids[i]);
    state_.ledger.touch(ids[i], inner);
    state_.ledger.use_on(ids[i], bit);
    const bool away =
        state_.ledger.away(ids[i]) && !zero_copy_.contains(ids[i]) && !stays_on_host(ids[i]);
    if (away && state_.ledger.at(ids[i]).op_pins == 0) wanted_.push_back(ids[i]);
  }
  if (!state_.active()) return;
  if (state_.asynchronous() &&
      !state_.fits(state_.limits.budget_bytes / 4)) {  // evictions are near
    const CallScope scope(state_.table, state_.place);
    const Status marked = transfers_.streams().mark(stream, state_.ledger.now());
    (void)marked;  // an eviction records its own then
  }
  for (RangeId id : wanted_) state_.attach(id);  // brought by page faults
  if (wanted_.empty() || state_.skip_for_capture(stream)) return;
  const CallScope scope(state_.table, state_.place);
  // Used while away, so page faults brought at least some of its pages. Now that the op is over,
  // the ledger is corrected: the unit stays if it fits, and is sent back otherwise.
  state_.count_error(moves_.fetch(wanted_, &stream));
  moved_.clear();
  for (RangeId id : wanted_) {
    if (!state_.ledger.away(id) || !moves_.fits_on_host(id)) continue;
    state_.ledger.set_state(id, State::kHost);
    moved_.push_back(id);
  }
  if (!moved_.empty()) state_.count_error(transfers_.send_back(moved_));
}

void Engine::outermost_ended(RangeId id, std::uint64_t born) {
  Ledger& ledger = state_.ledger;
  if (!ledger.live(id) || ledger.at(id).born != born) return;
  // The kernel that has just been launched may write what an inner operator has made.
  if (!workspaces_.may_be(ledger, id, ledger.at(id).family)) ledger.touch(id);
}

std::size_t Engine::shortage(std::size_t bytes) const {
  const std::size_t available = state_.view().available_bytes;
  return state_.active() && bytes > available ? bytes - available : 0;
}

void Engine::op_ended(const OpUse& op, cu::CUstream stream) {
  if (!state_.active() || !state_.follows_plans()) return;
  const policy::Followed followed = state_.planned->op_ended(state_.view(), op);
  state_.counters.plan_hits += followed == policy::Followed::kHit ? 1 : 0;
  state_.counters.plan_misses += followed == policy::Followed::kMiss ? 1 : 0;
  apply_pending(stream);
}

void Engine::left_behind(const RangeId* ids, std::size_t count, Family family) {
  // Later products use a workspace unseen, so it stays unless an op names it: then it is a result.
  for (std::size_t i = 0; state_.mapped() && i < count; ++i)
    if (workspaces_.may_be(state_.ledger, ids[i], family)) state_.ledger.set_fresh(ids[i]);
  if (!workspaces_.looking()) return;
  for (std::size_t i = 0; i < count; ++i) workspaces_.left_behind(state_.ledger, ids[i], family);
  wanted_.clear();
  workspaces_.find(state_.ledger, wanted_);
  if (wanted_.empty() || !state_.active()) return;
  const CallScope scope(state_.table, state_.place);
  for (RangeId id : wanted_) {
    moves_.make_room(state_.ledger.at(id).bytes);
    moves_.bring(id);
  }
}

void Engine::step_ended() {
  check_invariants();
  if (state_.ledger.any_collective()) finish_moves();
  (void)state_.ledger.end_collectives();  // the result, whether there was any, is not needed
  moves_.step_ended();
  zero_copy_.step_ended();
  if (!state_.active() || !state_.follows_plans()) return;
  state_.planned->step_ended(state_.view());
  apply_pending(nullptr);
}

// One submission per unit, so that no op waits for more than the room or the bytes of one unit.
void Engine::apply_pending(cu::CUstream stream) {
  if (!state_.active() || !state_.planned || !state_.planned->has_pending() ||
      state_.skip_for_capture(stream))
    return;
  const CallScope scope(state_.table, state_.place);
  write_back_.apply_read_mostly();
  leaving_.clear();
  state_.planned->evictions(state_.view(), leaving_);
  for (RangeId id : leaving_) {
    one_.assign(1, id);
    state_.count_error(moves_.send_out(one_));
  }
  write_back_.apply_pending();
  moves_.make_room(std::min(state_.planned->headroom(), state_.share()));
  while (true) {
    const RangeId id = state_.planned->next_fetch(state_.view());
    if (id == kNoRange) break;
    moves_.bring(id);
  }
  moves_.drop_ahead();
  if (!state_.planned->take_wait()) return;
  state_.count_error(transfers_.await(transfers_.in().last(), 0, stream));
  state_.count_error(transfers_.out().make_wait(stream, transfers_.out().last()));
}

bool Engine::make_room(std::size_t bytes) {
  const CallScope scope(state_.table, state_.place);
  return state_.active() && moves_.make_room(bytes);
}

std::size_t Engine::unused_bytes() const {
  std::size_t used = state_.ledger.resident_bytes();
  // Live, and populated by faults if at all: not known to be without contents.
  for (RangeId id = 1; id < state_.ledger.capacity(); ++id)
    used += state_.ledger.at(id).state == State::kVoid ? state_.ledger.at(id).bytes : 0;
  return state_.attached_bytes() - std::min(state_.attached_bytes(), used);
}

void Engine::forget_unused() {
  Ledger& ledger = state_.ledger;
  state_.attached.clear();
  state_.recycled_bytes = 0;
  for (RangeId id = 1; id < ledger.capacity(); ++id) {
    ledger.forget_dropped(id);
    const State state = ledger.at(id).state;
    if (state == State::kDevice || state == State::kDead || state == State::kVoid)
      state_.attach(id);
  }
  sharing_.forget_dropped();
}

void Engine::check_invariants() const {
  state_.ledger.check_invariants(sharing_.idle());
  UMEM_ASSERT(!state_.active() || state_.attached_bytes() >= state_.ledger.resident_bytes(),
              "the driver holds device memory for all that is resident");
}

void Engine::finish_moves() {
  if (state_.mapped()) state_.count_error(transfers_.finish());
}

void Engine::end_moves() {
  zero_copy_.clear();
  if (!state_.mapped()) return;
  const CallScope scope(state_.table, state_.place);
  finish_moves();  // work on the device may use what is on the host
  moves_.note_failures();
  std::vector<RangeId> parted;
  const Status apart = sharing_.part(true, {}, parted);
  if (apart.code() != Code::kOutOfHostMemory) state_.count_error(apart);
  for (RangeId id = 1; id < state_.ledger.capacity(); ++id) {
    if (!state_.ledger.live(id) || !state_.ledger.away(id)) continue;
    const bool joined = state_.ledger.at(id).joined;  // it stays where it is
    const bool fits = joined || state_.fits(state_.ledger.at(id).bytes);
    if (fits) state_.ledger.set_state(id, State::kDevice);
    if (joined) continue;
    state_.count_error(
        transfers_.make_usable(id, fits ? managed::Where::kDevice : managed::Where::kHost));
  }
  finish_moves();  // no op waits for a copy any more
}

Status Engine::set_limits(Limits limits) {
  const CallScope scope(state_.table, state_.place);
  if (const Status fits = hints_.check_user_pins(0, limits.budget_bytes); !fits.ok())
    return {fits.code(), "the budget cannot be that low: " + fits.message()};
  const Limits previous = std::exchange(state_.limits, limits);
  if (!state_.managed) return {};
  if (state_.active()) moves_.make_room(0);
  // Memory outside of umem may exceed any budget, and must not prevent setting one.
  if (!state_.active() || state_.ledger.resident_bytes() <= state_.share()) return {};
  state_.limits = previous;
  return {Code::kOutOfDeviceMemory,
          "the budget cannot be lowered: running ops hold " +
              format_bytes(state_.ledger.op_pinned_bytes()) +
              ", the program excluded what is on the device (umem.exclude), or the host budget is "
              "full"};
}

void Engine::set_outside_bytes(std::size_t bytes) {
  state_.limits.outside_bytes = bytes;
  if (!state_.active()) return;
  const CallScope scope(state_.table, state_.place);
  moves_.make_room(0);
}

void Engine::set_policy(const policy::Policy& policy) {
  const bool was_active = state_.active();
  write_back_.clear();
  state_.set_policy(policy);
  if (was_active == state_.active()) return;
  const CallScope scope(state_.table, state_.place);
  if (!state_.active()) {
    end_moves();
    // From now on the driver moves pages as it likes, and the ledger cannot track them.
    while (state_.ledger.oldest_resident() != kNoRange)
      state_.ledger.set_state(state_.ledger.oldest_resident(), State::kVoid);
    while (state_.ledger.oldest_dead() != kNoRange)
      state_.ledger.set_state(state_.ledger.oldest_dead(), State::kGone);
    return sharing_.lose_track(false);
  }
  // The opposite: pages that the driver left anywhere are brought to known places, to the host as
  // long as it has room. Mapped memory is where it was placed.
  moved_.clear();
  std::vector<RangeId> stay;
  for (RangeId id = 1; id < state_.ledger.capacity(); ++id) {
    if (state_.ledger.at(id).state != State::kVoid) continue;
    const bool kept = state_.ledger.kept_in_place(id);
    const bool stays = state_.mapped() || kept || !moves_.fits_on_host(id);
    state_.ledger.set_state(id, stays ? State::kDevice : State::kHost);
    (stays ? stay : moved_).push_back(id);
  }
  dropped_.clear();
  for (RangeId id = 1; id < state_.ledger.capacity(); ++id)
    if (state_.ledger.at(id).state == State::kGone) dropped_.push_back(id);
  if (!dropped_.empty()) state_.count_error(transfers_.discard(dropped_));
  sharing_.lose_track(true);
  if (!moved_.empty()) state_.count_error(transfers_.send_back(moved_));
  moves_.make_room(0);
  if (state_.mapped()) return;
  std::erase_if(stay, [&](RangeId id) { return state_.ledger.at(id).state != State::kDevice; });
  if (!stay.empty()) state_.count_error(transfers_.bring_in(stay, nullptr));
}

}  // namespace umem::engine
