#include "engine/moves.h"

#include <algorithm>
#include <utility>

namespace umem::engine {
namespace {

using driver::CallScope;

constexpr std::size_t kMaxAhead = 256 * MiB;
constexpr std::size_t kRoomShare = 32;  // of the budget

}  // namespace

bool Moves::fits_on_host(RangeId id) {
  if (state_.limits.host_budget_bytes == 0) return true;
  const auto fits = [&] {
    const Unit& unit = state_.ledger.at(id);
    const std::size_t more = unit.bytes - std::min(unit.bytes, unit.host_bytes);
    return state_.ledger.host_bytes() + more <= state_.limits.host_budget_bytes;
  };
  if (fits()) return true;
  release_cached_();
  return fits();
}

// The lane waits until departures under way have left room for the resident bytes. Dead bytes make
// room at once: they are dropped first, unless they leave like others, after the work that used
// them.
Status Moves::wait_for_space(Lane& lane) {
  if (!state_.mapped() && state_.ledger.dead_bytes() > 0 && transfers_.local().can_discard())
    discard_dead(transfers_.out().under_way());
  const std::size_t full = std::min(state_.taken(), state_.limits.budget_bytes);
  return transfers_.wait_for_room(lane, state_.limits.budget_bytes - full);
}

Status Moves::populate(RangeId id) {
  UMEM_RETURN_IF_ERROR(wait_for_space(transfers_.local()));
  const Unit& unit = state_.ledger.at(id);
  if (unit.host_bytes > 0 && !transfers_.local().can_discard())
    state_.counters.bytes_in += unit.bytes;  // old ones
  return transfers_.populate(id);
}

// Drops dead units, those first that serve again last, until `bytes` more fit or none is left.
void Moves::discard_dead(std::size_t bytes) {
  const Lane& local = transfers_.local();
  if (local.can_discard()) drop_dead(bytes);
  if (!local.can_discard()) send_dead_out(bytes);  // the driver may just have refused
}

void Moves::drop_dead(std::size_t bytes) {
  Ledger& ledger = state_.ledger;
  dropped_.clear();
  while (!state_.fits(bytes)) {
    const RangeId id = ledger.last_to_revive();
    if (id == kNoRange) break;
    dropped_.push_back(id);
    ledger.drop(id);
  }
  const Status status = dropped_.empty() ? Status() : transfers_.discard(dropped_);
  state_.count_error(status);
  const bool can_discard = transfers_.local().can_discard();  // the driver may just have refused
  for (RangeId id : dropped_) {
    if (status.ok() && can_discard)
      state_.counters.bytes_discarded += ledger.at(id).bytes;
    else
      ledger.set_state(id, State::kDead);  // still where it was
  }
  if (can_discard) sharing_.drop(bytes);
}

// If the driver cannot discard, dead bytes are evicted like live ones. That copies useless bytes,
// but concurrently with compute and mostly against the direction of the fetches; the alternative,
// freeing their addresses, waits for the device.
void Moves::send_dead_out(std::size_t bytes) {
  Ledger& ledger = state_.ledger;
  dropped_.clear();
  while (!state_.fits(bytes) && ledger.oldest_dead() != kNoRange) {
    const RangeId id = ledger.oldest_dead();
    if (!fits_on_host(id)) break;  // `release_cached` has freed all it could
    if (!ledger.has(id) || ledger.at(id).state != State::kDead) continue;
    ledger.set_state(id, State::kGone);
    ledger.hold_host(id);
    dropped_.push_back(id);
  }
  std::erase_if(dropped_, [&](RangeId id) { return !ledger.has(id); });
  state_.count_error(send_back(dropped_, State::kDead));
  sharing_.drop(bytes);
}

// Submits the eviction of units that the ledger already has on the host. If it fails they are
// `before` again.
Status Moves::send_back(const std::vector<RangeId>& ids, State before) {
  if (ids.empty()) return {};
  Status status = transfers_.send_back(ids, true);
  for (RangeId id : ids) {
    if (!status.ok())
      state_.ledger.set_state(id, before);
    else if (!state_.ledger.at(id).clean)
      state_.counters.bytes_out += state_.ledger.at(id).bytes;
  }
  return status;
}

Status Moves::send_out(const std::vector<RangeId>& victims) {
  Ledger& ledger = state_.ledger;
  Counters& counters = state_.counters;
  moved_.clear();
  for (RangeId id : victims) {
    // In use by another thread's op, joined, or no room on the host: the unit stays.
    const Unit& unit = ledger.at(id);
    if (unit.state != State::kDevice || unit.op_pins > 0 || unit.joined || !fits_on_host(id))
      continue;
    moved_.push_back(id);
    if (unit.prefetched_unused) counters.prefetched_unused_bytes += unit.bytes;
    ledger.set_state(id, State::kHost);
  }
  UMEM_RETURN_IF_ERROR(send_back(moved_, State::kDevice));
  counters.evictions += moved_.size();
  return {};
}

Status Moves::send_again(const std::vector<RangeId>& ids) {
  for (RangeId id : ids) {
    state_.ledger.set_state(id, State::kHost);
    state_.attach(id);
  }
  return ids.empty() ? Status() : transfers_.send_back(ids);
}

bool Moves::make_room(std::size_t bytes) {
  if (state_.fits(bytes)) return true;
  const std::size_t wanted = std::min(bytes, state_.share());
  discard_dead(wanted);
  const bool stays = sharing_.stays();
  const auto part = [&] {
    if (state_.fits(wanted) || state_.joined_idle == 0) return;
    const Status parted = part_layout();
    (void)parted;  // in use: the units beside it leave, and it is tried again
  };
  if (!stays) part();
  if (!state_.fits(wanted)) {
    const std::uint64_t before = state_.counters.evictions;
    evict(wanted);
    // Slow, because the collective may be using them, but faster than page faults.
    if (!state_.fits(wanted) && !state_.mapped() && state_.ledger.end_collectives()) evict(wanted);
    if (stays) part();
    if (stays && !state_.fits(wanted)) evict(wanted);  // what was parted and came back
    short_now_ = short_now_ || state_.counters.evictions > before;
  }
  return state_.fits(bytes);
}

// Evicts live units until `wanted` more bytes fit, or none may be evicted.
void Moves::evict(std::size_t wanted) {
  if (!preferred_victims_.empty()) evict_preferred(wanted);
  if (state_.fits(wanted)) return;
  victims_.clear();
  state_.victims(state_.taken() + wanted - state_.limits.budget_bytes, victims_);
  state_.count_error(send_out(victims_));
  if (!state_.follows_plans()) return;
  for (RangeId id : victims_)
    if (state_.ledger.at(id).state == State::kHost) state_.planned->evicted(id);
}

void Moves::evict_preferred(std::size_t wanted) {
  const CandidateView now = state_.view();
  victims_.clear();
  std::size_t left = state_.taken() + wanted - state_.limits.budget_bytes;
  for (RangeId id : std::exchange(preferred_victims_, {})) {
    if (left == 0) break;
    const bool leaves = state_.ledger.has(id) && now.evictable(id) &&
                        std::find(victims_.begin(), victims_.end(), id) == victims_.end();
    if (!leaves) {
      ++state_.counters.advice_ignored;
      continue;
    }
    victims_.push_back(id);
    left -= std::min(left, state_.ledger.at(id).bytes);
  }
  state_.count_error(send_out(victims_));
}

std::size_t Moves::room_ahead() const {
  return state_.mapped() ? std::min(state_.limits.budget_bytes / kRoomShare, kMaxAhead) : 0;
}

void Moves::drop_ahead() {
  if (!state_.follows_plans() || !state_.planned->moves()) return;
  const std::size_t room = room_ahead();
  if (room > 0 && !state_.fits(room)) discard_dead(room);
}

void Moves::evict_ahead() {
  if (!state_.asynchronous() || !(short_now_ || short_before_)) return;
  if (state_.follows_plans() && state_.planned->gated()) return;
  const std::size_t ahead = std::min(state_.limits.budget_bytes / 16, kMaxAhead);
  if (state_.fits(ahead)) return;
  discard_dead(ahead);
  if (!state_.fits(ahead)) evict(std::min(ahead, state_.share()));
}

Status Moves::part_layout(const std::vector<RangeId>* leaving, bool lost) {
  static const std::vector<RangeId> kNone;
  std::vector<RangeId> parted;
  UMEM_RETURN_IF_ERROR(
      sharing_.part(leaving != nullptr, leaving && lost ? *leaving : kNone, parted));
  if (leaving)  // what sleeps stays away until it is woken
    std::erase_if(parted, [&](RangeId id) {
      return std::find(leaving->begin(), leaving->end(), id) != leaving->end();
    });
  if (state_.follows_plans())
    for (RangeId id : parted) state_.planned->evicted(id);
  if (!leaving) std::erase_if(parted, [&](RangeId id) { return !state_.ledger.kept_in_place(id); });
  return parted.empty() ? Status() : fetch(parted, nullptr);
}

void Moves::step_ended() {
  if (short_now_ && state_.joined_idle > 0 && !sharing_.stays()) {
    const CallScope scope(state_.table, state_.place);
    const Status parted = part_layout();
    (void)parted;  // in use: tried again after the next step
  }
  short_before_ = short_now_;
  short_now_ = false;
}

Status Moves::fetch(const std::vector<RangeId>& ids, const cu::CUstream* consumer) {
  Ledger& ledger = state_.ledger;
  std::size_t need = 0;
  for (RangeId id : ids)  // nothing is evicted for a unit that can never fit
    if (ledger.at(id).bytes <= state_.share()) need += ledger.at(id).bytes;
  make_room(need);
  moved_.clear();
  bool copies = true;
  for (RangeId id : ids) {
    // The op needs more than the budget: the rest is used on the host.
    if (!state_.fits(ledger.at(id).bytes)) {
      ++state_.counters.left_out;
      continue;
    }
    const bool data = ledger.at(id).state == State::kHost && !ledger.at(id).discarded;
    copies = copies && data;
    if (data) state_.counters.bytes_in += ledger.at(id).bytes;
    if (data && ledger.at(id).read_mostly) ledger.set_clean(id);
    ledger.set_state(id, State::kDevice);
    moved_.push_back(id);
  }
  state_.counters.prefetches += moved_.size();
  if (moved_.empty()) return {};
  Status status = wait_for_space(transfers_.in());
  if (status.ok()) status = transfers_.bring_in(moved_, consumer, copies);
  if (status.ok() && consumer && state_.mapped())
    status = transfers_.in().outcome(transfers_.in().last());
  if (!status.ok())  // presumably on the host, and used there
    for (RangeId id : moved_) ledger.set_state(id, State::kHost);
  return status;
}

void Moves::bring(RangeId id) {
  const std::size_t bytes = state_.ledger.at(id).bytes;
  if (!state_.ledger.away(id) || used_in_place(id)) return;
  if (!state_.fits(bytes)) discard_dead(bytes);
  if (!state_.fits(bytes)) return;
  one_.assign(1, id);
  state_.count_error(fetch(one_, nullptr));
  if (!state_.ledger.away(id)) state_.ledger.set_prefetched(id);
}

bool Moves::note_failures() {
  if (!state_.mapped()) return false;
  const std::vector<Ticket> failed = transfers_.in().take_failed();
  if (failed.empty()) return false;
  for (RangeId id = 1; id < state_.ledger.capacity(); ++id) {
    const residency::Unit& unit = state_.ledger.at(id);
    const bool dead = unit.state == State::kDead;
    if ((unit.state == State::kDevice || dead) &&
        std::find(failed.begin(), failed.end(), unit.arrival) != failed.end())
      state_.ledger.set_state(id, dead ? State::kGone : State::kHost);
  }
  return true;
}

// Mapped memory must not move while a running operator, or a collective, uses it on the host.
bool Moves::used_in_place(RangeId id) const {
  const residency::Unit& unit = state_.ledger.at(id);
  return state_.mapped() && (unit.op_pins > 0 || unit.fresh || unit.in_collective);
}

Status Moves::prefetch(RangeId id, const cu::CUstream* consumer) {
  if (!state_.managed || !state_.ledger.away(id)) return {};
  const CallScope scope(state_.table, state_.place);
  one_.assign(1, id);
  if (!state_.active())  // mapped memory is in its place then
    return state_.mapped() ? Status() : transfers_.bring_in(one_, nullptr);
  UMEM_RETURN_IF_ERROR(fetch(one_, consumer));
  if (state_.ledger.away(id))
    return {Code::kOutOfDeviceMemory, "the block does not fit in addition to the memory in use"};
  state_.ledger.set_prefetched(id);
  return {};
}

}  // namespace umem::engine
