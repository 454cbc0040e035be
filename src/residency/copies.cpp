// What is advised as read-mostly: the driver keeps the host's copy of it valid while it is on the
// device, so that it leaves without a transfer.
#include <algorithm>
#include <utility>

#include "backing/mover.h"
#include "residency/engine.h"

namespace umem::residency {

using backing::Where;
using driver::CallScope;

Status Engine::advise_copies(RangeId id, bool on, bool by_policy) {
  if (!managed_) return {};
  const CallScope scope(table_, place_);
  out_.issue_until(ledger_.at(id).departure);  // a drop takes the advice back for a while
  const State state = ledger_.at(id).state;
  const bool there = state == State::kDevice || state == State::kDead;
  UMEM_RETURN_IF_ERROR(on ? backing::advise_read_mostly(table_, span(id))
                          : backing::collapse_copies(table_, span(id),
                                                     there ? Where::kDevice : Where::kHost,
                                                     place_.device));
  ledger_.set_read_mostly(id, on, by_policy);
  return {};
}

// These are read-mostly by the policy's wish, and no others. The program's own hints stay.
void Engine::keep_copies(std::vector<RangeId> wanted) {
  std::sort(wanted.begin(), wanted.end());
  for (RangeId id : copied_)
    if (ledger_.has(id) && ledger_.at(id).by_policy &&
        !std::binary_search(wanted.begin(), wanted.end(), id))
      note(advise_copies(id, false, true));
  for (RangeId id : wanted)
    if (ledger_.has(id) && !ledger_.at(id).read_mostly) note(advise_copies(id, true, true));
  copied_ = std::move(wanted);
}

// Nothing writes the unit for a while. What is on the device is copied to the host and stays; what
// is on its way there, or has gone, is copied by its way back.
Status Engine::begin_copy(RangeId id) {
  const Unit& unit = ledger_.at(id);
  const bool here = unit.state == State::kDevice;
  if (!managed_ || unit.read_mostly || unit.pins > 0 || (!here && unit.state != State::kHost))
    return {};
  if (here && !host_has_room(id)) return {};
  one_.assign(1, id);
  UMEM_RETURN_IF_ERROR(submit_out(Verb::kCopy, one_));
  ledger_.set_read_mostly(id, true, true);
  if (!here) return {};
  ledger_.hold_host(id);
  ledger_.set_clean(id);
  counters_.bytes_out += unit.bytes;
  return {};
}

void Engine::end_copy(RangeId id) {
  if (ledger_.has(id) && ledger_.at(id).by_policy) note(advise_copies(id, false, true));
}

}  // namespace umem::residency
