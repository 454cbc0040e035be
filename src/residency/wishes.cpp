// What a policy that follows a plan is told, and what it wants done between ops.
#include <algorithm>
#include <utility>
#include <vector>

#include "residency/engine.h"

namespace umem::residency {

using driver::CallScope;

View Engine::view() const {
  const std::size_t alive = taken() - ledger_.dead_bytes();
  return {ledger_, limits_.min_swap_bytes,
          limits_.budget_bytes - std::min(alive, limits_.budget_bytes)};
}

std::size_t Engine::shortage(std::size_t bytes) const {
  const std::size_t room = view().room_bytes;
  return active() && bytes > room ? bytes - room : 0;
}

void Engine::op_ended(const RangeId* ids, std::size_t count, cu::CUstream stream) {
  if (!active() || !policy_->follows()) return;
  const Followed followed = policy_->op_ended(view(), ids, count);
  counters_.plan_hits += followed == Followed::kHit ? 1 : 0;
  counters_.plan_misses += followed == Followed::kMiss ? 1 : 0;
  carry_out(stream);
}

void Engine::step_ended() {
  if (!active() || !policy_->follows()) return;
  policy_->step_ended(view());
  carry_out(nullptr);
}

// One submission a unit: what needs the room of one, or its bytes, waits for no other.
void Engine::carry_out(cu::CUstream stream) {
  if (!active() || !policy_->wishes() || quiet(stream)) return;
  const CallScope scope(table_, place_);
  if (std::vector<RangeId> wanted; policy_->take_read_mostly(wanted))
    keep_copies(std::move(wanted));
  leaving_.clear();
  policy_->evictions(view(), leaving_);
  for (RangeId id : leaving_) {
    one_.assign(1, id);
    note(send_out(one_));
  }
  leaving_.clear();
  rewritten_.clear();
  policy_->copies(view(), leaving_, rewritten_);
  for (RangeId id : leaving_) note(begin_copy(id));
  for (RangeId id : rewritten_) end_copy(id);
  make_room(std::min(policy_->headroom(), share()));
  while (true) {
    const RangeId id = policy_->next_fetch(view());
    if (id == kNoRange) break;
    bring(id);
  }
  if (!policy_->take_wait()) return;
  note(await(in_.last(), 0, stream));
  note(out_.make_wait(stream, out_.last()));
}

// Without evicting: where dead bytes cannot be dropped the unit comes when an op needs it.
void Engine::bring(RangeId id) {
  const std::size_t bytes = ledger_.at(id).bytes;
  if (!away(id)) return;
  if (!fits(bytes)) discard_dead(bytes);
  if (!fits(bytes)) return;
  one_.assign(1, id);
  note(fetch(one_, nullptr));
  if (!away(id)) ledger_.set_prefetched(id);
}

}  // namespace umem::residency
