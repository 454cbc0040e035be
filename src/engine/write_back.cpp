#include "engine/write_back.h"

#include <utility>

#include "managed/memory_ops.h"

namespace umem::engine {

using driver::CallScope;
using managed::Where;

Status WriteBack::advise(RangeId id, bool on, bool by_policy) {
  // Mapped memory has one place, and writes to it are not noticed.
  if (!state_.managed || state_.mapped()) return {};
  const CallScope scope(state_.table, state_.place);
  Ledger& ledger = state_.ledger;
  // A drop suspends the advice meanwhile.
  transfers_.out().issue_until(ledger.at(id).departure);
  const State state = ledger.at(id).state;
  const bool there = state == State::kDevice || state == State::kDead;
  const managed::MemSpan span = state_.span(id);
  if (on) zero_copy_.end(id);
  UMEM_RETURN_IF_ERROR(on ? managed::advise_read_mostly(state_.table, span)
                          : managed::collapse_copies(state_.table, span,
                                                     there ? Where::kDevice : Where::kHost,
                                                     state_.place.device));
  ledger.set_read_mostly(id, on, by_policy);
  // Pages on the device are mapped read-only, and the next write to each would fault. A prefetch to
  // their own place maps them as writable, and moves nothing.
  if (!on && there && state_.asynchronous()) {
    one_.assign(1, id);
    return transfers_.bring_in(one_, nullptr);
  }
  return {};
}

// Leaves the program's own hints in place.
void WriteBack::apply_read_mostly() {
  std::vector<RangeId> wanted;
  if (!state_.planned->take_read_mostly(wanted)) return;
  const Ledger& ledger = state_.ledger;
  for (RangeId id : wanted)
    if (ledger.has(id) && !ledger.at(id).read_mostly) state_.count_error(advise(id, true, true));
}

void WriteBack::apply_pending() {
  begin_.clear();
  end_.clear();
  state_.planned->write_backs(state_.view(), begin_, end_);
  for (RangeId id : begin_) state_.count_error(begin(id));
  for (RangeId id : end_) end(id);
}

void WriteBack::clear() {
  for (RangeId id = 1; id < state_.ledger.capacity(); ++id) end(id);
}

// Nothing writes the unit for a while. A unit on the device is copied to the host and stays; a unit
// that is away is copied by its way back.
Status WriteBack::begin(RangeId id) {
  Ledger& ledger = state_.ledger;
  const Unit& unit = ledger.at(id);
  const bool here = unit.state == State::kDevice;
  if (!state_.managed || state_.mapped() || unit.read_mostly || unit.op_pins > 0 ||
      (!here && unit.state != State::kHost))
    return {};
  if (here && !moves_.fits_on_host(id)) return {};
  zero_copy_.end(id);
  one_.assign(1, id);
  UMEM_RETURN_IF_ERROR(transfers_.submit_out(Verb::kWriteBack, one_, true));
  ledger.set_read_mostly(id, true, true);
  if (!here) return {};
  ledger.hold_host(id);
  ledger.set_clean(id);
  state_.counters.bytes_out += unit.bytes;
  return {};
}

void WriteBack::end(RangeId id) {
  if (state_.ledger.has(id) && state_.ledger.at(id).by_policy)
    state_.count_error(advise(id, false, true));
}

}  // namespace umem::engine
