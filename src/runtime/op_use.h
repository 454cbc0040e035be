// The units that running ops use, and what they use above the budget.
#pragma once
#include <cstddef>
#include <cstdint>

#include "managed/range_table.h"
#include "runtime/op.h"

namespace umem::runtime {

struct Device;

// The top of the calling thread's op stack.
extern constinit thread_local Op* t_op;

// Notes that the op has pinned the unit. An op that cannot record a pin goes without it.
void pin_slot(Op& op, managed::RangeId id);
// Pins the live units of the range for the op.
void pin(Op& op, Device& device, managed::RangeId id);
// Calls `act` with the pieces that the input uses of the range of `id`, which is its storage's.
template <class Act>
void each_used(const managed::RangeTable& ranges, const Input& input, managed::RangeId id,
               Act act) {
  if (input.bytes == 0 || ranges.whole(id))  // nearly always
    ranges.each_piece(id, act);
  else
    ranges.each_piece_in(input.begin(), input.bytes, act);
}
// Once for each device: `what` uses `bytes` at once, and they do not fit.
void warn_above_budget(Device& device, const char* what, std::size_t bytes);
// Counts the op, and warns, if what it and the ops around it use is above the budget.
void note_above_budget(Device& device, Op& op);

}  // namespace umem::runtime
