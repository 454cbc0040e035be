"""Constraints that plans must meet, and the memory they take when no transfer is late."""

from __future__ import annotations

import numpy as np

from umem.policies.base import Plan
from umem.policies.plan_check import check
from umem.trace.step_trace import Ints, Kind, StepTrace


def problems(plan: Plan, *, deadlines: bool = True) -> list[str]:
    """Return every breach: those of `check`, and of the further rules of umem's own plans.

    With `deadlines` each fetch must be for the tensor's next use.
    """
    trace = plan.trace
    found = check(plan)
    for label, moves in (("evict", plan.evict), ("evict_first", plan.evict_first)):
        for move in moves:
            if move.after >= 0 and move.after not in trace.uses(move.tensor):
                found.append(f"{label} {move}: not after a use")
    for one in plan.fetch:
        if deadlines and one.by != next_use(trace, one.tensor, one.after):
            found.append(f"{one}: the next use is at {next_use(trace, one.tensor, one.after)}")
    return found


def next_use(trace: StepTrace, tensor: int, after: int) -> int | None:
    """The op of the next use, counted on round the step's end for what persists."""
    uses = trace.uses(tensor)
    later = uses[uses > after]
    if len(later):
        return int(later[0])
    if trace.kind[tensor] == Kind.PERSISTENT and len(uses):
        return int(uses[0]) + trace.n_ops
    return None


def occupancy(plan: Plan) -> Ints:
    """[n_ops] Bytes of large tensors: away from the eviction to the next use."""
    trace = plan.trace
    n = trace.n_ops
    there = np.zeros(n, np.int64)
    for tensor in np.flatnonzero(trace.large):
        alive = np.zeros(n, bool)
        alive[trace.first[tensor] : trace.last[tensor] + 1] = True
        for move in plan.evict:
            if move.tensor == tensor:
                back = next_use(trace, int(tensor), move.after)
                if back is None:
                    persistent = trace.kind[tensor] == Kind.PERSISTENT
                    back = move.after + 1 + n if persistent else int(trace.last[tensor]) + 1
                away = np.arange(move.after + 1, back)
                alive[away % n] = False
        there[alive] += trace.bytes[tensor]
    return there
