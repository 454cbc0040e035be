// The duration of a step with tensors away: the loops of umem/policies/default/estimate.py, which
// describes the columns. Places in a step are numbers of its ops; numbers beyond its end, and below
// 0, are in the next and previous step.
#pragma once
#include <cstdint>
#include <vector>

#include "base/export.h"
#include "planner/choice.h"

namespace umem::planner {

struct ReturnStarts {
  std::vector<std::int64_t> op;     // start op of each return
  std::vector<std::int64_t> taken;  // bytes at each op, with all returns
};

// One row per return, by deadline: a tensor of `bytes` leaves after op `start`, or may return from
// then on, and is used in op `end`. `occupancy`: bytes at each op with all of them away; `room`:
// the capacity.
UMEM_API ReturnStarts return_starts(Ints start, Ints end, Ints bytes, Ints occupancy,
                                    std::int64_t available);

// One row per op.
struct Ops {
  Floats us;
  Floats slack_us;  // of the outbound link: departures may take this long without being waited for
};

// One row per gap, in the order in which tensors leave after the same op.
struct AwayGaps {
  Ints start;
  Floats out_us, in_us;  // on the link
  Ints quiet;            // row of the quiet time that contains it; -1: none
};

// One row per gap whose tensor returns, by deadline.
struct Returns {
  Ints gap, start, end;  // op at which the return starts, and op that uses the tensor
  Floats room_us;        // time in which as many bytes leave
};

// One row per time between two writes in which a tensor leaves.
struct QuietTimes {
  Ints written, due;  // op of the previous write, and op after which it leaves first
  Floats out_us;
};

// One row per parameter that the host updates: it leaves in one gap, and its gradient in another.
// The work begins when both have left, and the parameter returns when it is complete.
struct HostUpdates {
  Ints parameter, gradient;  // gaps
  Floats us;
};

struct Estimate {
  double us = 0;
  // For each quiet time: the op at whose begin the copy on the host starts, by the step in which
  // the time ends; `never` if there is none.
  std::vector<std::int64_t> copied;
};

UMEM_API Estimate estimate(const Ops& ops, const AwayGaps& away, const Returns& returns,
                           const QuietTimes& quiet, const HostUpdates& updates, std::int64_t never);

}  // namespace umem::planner
