// The units that running ops use, and warnings for ops that use more than the budget.
#pragma once
#include <cstddef>
#include <cstdint>

#include "managed/range_table.h"
#include "runtime/op.h"

namespace umem::runtime {

struct Device;

// The top of the calling thread's op stack.
extern constinit thread_local Op* t_op;

// Records that the op pinned the unit. If the op cannot record it, the unit is not pinned.
void pin_slot(Op& op, managed::RangeId id);
// Pins the live units of the range for the op.
void pin(Op& op, Device& device, managed::RangeId id);
// Calls `act` with the pieces of the storage's range `id` that the input uses.
template <class Act>
void each_used(const managed::RangeTable& ranges, const Input& input, managed::RangeId id,
               Act act) {
  if (input.bytes == 0 || ranges.whole(id))  // the common case
    ranges.each_piece(id, act);
  else
    ranges.each_piece_in(input.begin(), input.bytes, act);
}
// Warns, once per device, that `what` uses `bytes` at once, which do not fit.
void warn_above_budget(Device& device, const char* what, std::size_t bytes);
// Counts the op, and warns, if it and its enclosing ops use more than the budget.
void note_above_budget(Device& device, Op& op);

}  // namespace umem::runtime
