// How long a step takes with tensors away: the loops of umem/policies/default/estimate.py, which
// says what the columns are. Places in a step are numbers of its ops; beyond its end, and below 0,
// they are in the step after it and before it.
#pragma once
#include <cstdint>
#include <vector>

#include "base/export.h"
#include "planner/choice.h"

namespace umem::planner {

struct ReturnStarts {
  std::vector<std::int64_t> op;     // of each return, at which it starts
  std::vector<std::int64_t> taken;  // at each op, bytes with all of them
};

// A row a return, by deadline: a tensor of so many bytes leaves after op `start`, or may return
// from then on, and is used in op `end`. `occupancy`: bytes at each op with all of them away;
// `room`: bytes that there may be.
UMEM_API ReturnStarts return_starts(Ints start, Ints end, Ints bytes, Ints occupancy,
                                    std::int64_t available);

// A row an op.
struct Ops {
  Floats us;
  Floats slack_us;  // of the link out: what is leaving may take so long without being waited for
};

// A row a gap, in the order in which tensors leave after one op.
struct AwayGaps {
  Ints start;
  Floats out_us, in_us;  // of the link
  Ints quiet;            // the row of the quiet time that it lies in; -1: none
};

// A row a gap whose tensor returns, by deadline.
struct Returns {
  Ints gap, start, end;  // the op at which the return starts, and the one that uses the tensor
};

// A row a time between two writes in which a tensor leaves.
struct QuietTimes {
  Ints written, due;  // the op of the write before, and the op after which it leaves first
  Floats out_us;
};

// A row a parameter that the host updates: it leaves in one gap, and its gradient in another one.
// The work begins when both have left, and the parameter returns when it is over.
struct HostUpdates {
  Ints parameter, gradient;  // gaps
  Floats us;
};

struct Estimate {
  double us = 0;
  // Of each quiet time the op at whose begin the copy on the host is begun, by the step in which
  // the time ends; `never` where none is.
  std::vector<std::int64_t> copied;
};

UMEM_API Estimate estimate(const Ops& ops, const AwayGaps& away, const Returns& returns,
                           const QuietTimes& quiet, const HostUpdates& updates, std::int64_t never);

}  // namespace umem::planner
