"""What a plan must keep to, and the memory it takes when nothing is late. For tests only."""

from __future__ import annotations

import numpy as np

from umem.policies.base import Plan
from umem.trace.step import Ints, Kind, StepTrace


def problems(plan: Plan, *, deadlines: bool = True) -> list[str]:
    """Every breach, in words. `deadlines`: each fetch must be for the tensor's next use."""
    trace = plan.trace
    n = trace.n_ops
    found = []
    for label, moves in (("evict", plan.evict), ("cold", plan.cold)):
        for move in moves:
            if not -1 <= move.after < n or not _may_move(trace, move.tensor, move.after):
                found.append(f"{label} {move}: not large, or not alive")
            elif move.after >= 0 and move.after not in trace.uses(move.tensor):
                found.append(f"{label} {move}: not after a use")
    for one in plan.fetch:
        if not -1 <= one.after < n or not one.after < one.by:
            found.append(f"{one}: not ahead")
        elif not _may_move(trace, one.tensor, one.after) or not _alive(trace, one.tensor, one.by):
            found.append(f"{one}: not large, or not alive")
        elif deadlines and one.by != next_use(trace, one.tensor, one.after):
            found.append(f"{one}: the next use is at {next_use(trace, one.tensor, one.after)}")
    for copy in plan.copy:
        if not -1 <= copy.after < n or not copy.after < copy.until <= 2 * n:
            found.append(f"{copy}: no op between")
        elif not _may_move(trace, copy.tensor, copy.after):
            found.append(f"{copy}: not large, or not alive")
        elif written := _written(trace, copy.tensor, copy.after, copy.until):
            found.append(f"{copy}: written in {written}")
    for tensor in (*plan.keep, *plan.read_mostly):
        if not 0 <= tensor < trace.n_tensors or not trace.large[tensor]:
            found.append(f"keep or read_mostly: {tensor}")
    if any(not trace.clean[tensor] for tensor in plan.read_mostly):
        found.append("read_mostly: a tensor that is written")
    if any(not 0 <= op < n for op in plan.waits) or len(set(plan.waits)) != len(plan.waits):
        found.append(f"waits: {plan.waits}")
    return found


def _written(trace: StepTrace, tensor: int, after: int, until: int) -> list[int]:
    """The ops between two that write the tensor."""
    wrote = trace.access_op[trace.access_write & (trace.access_tensor == tensor)]
    laps = (0, trace.n_ops) if trace.kind[tensor] == Kind.PERSISTENT else (0,)
    return [int(op) + lap for lap in laps for op in wrote if after < op + lap < until]


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
                back = next_use(trace, tensor, move.after)
                if back is None:
                    persistent = trace.kind[tensor] == Kind.PERSISTENT
                    back = move.after + 1 + n if persistent else int(trace.last[tensor]) + 1
                away = np.arange(move.after + 1, back)
                alive[away % n] = False
        there[alive] += trace.bytes[tensor]
    return there


def _alive(trace: StepTrace, tensor: int, op: int) -> bool:
    if trace.kind[tensor] == Kind.PERSISTENT or (op == -1 and trace.kind[tensor] == Kind.CARRIED):
        return True
    return bool(trace.first[tensor] <= op <= trace.last[tensor])


def _may_move(trace: StepTrace, tensor: int, op: int) -> bool:
    return bool(trace.large[tensor]) and _alive(trace, tensor, op)
