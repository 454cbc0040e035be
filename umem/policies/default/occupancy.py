"""Memory use of a step op by op, and the gaps in which tensors can be swapped out."""

from __future__ import annotations

import numpy as np

from ...base.units import PAGE_BYTES
from ...trace.step_trace import Gaps, Ints, Kind, StepTrace


def large_live_bytes(trace: StepTrace) -> Ints:
    """Return the bytes of the large tensors alive in each op, [n_ops], when nothing is moved."""
    return trace.live_bytes_of(trace.large)


def min_occupancy(trace: StepTrace) -> Ints:
    """Return the min bytes of large tensors in each op, [n_ops]: all gaps are spent swapped out."""
    gaps = all_gaps(trace)
    return large_live_bytes(trace) - bytes_over(gaps, trace.bytes[gaps.tensor], trace.n_ops)


def capacity(trace: StepTrace, budget: int) -> int:
    """Return the bytes for large tensors under `budget`.

    Small tensors stay on the device as long as the largest op still fits next to them; below that
    budget the engine pages them too, and the large ones get what that op needs. The pages that
    small tensors share are never quite full and take up to twice their bytes; a third of these
    bytes, but at most 1/64 of the budget, is reserved for that.
    """
    pages = budget // PAGE_BYTES * PAGE_BYTES
    if not trace.small_bytes:
        return pages
    least = int(min_occupancy(trace).max(initial=0))
    holes = min(trace.small_bytes // 3, pages // 64 // PAGE_BYTES * PAGE_BYTES)
    return min(pages, max(pages - trace.small_bytes - holes, least))


def movable_gaps(trace: StepTrace) -> Gaps:
    """Return the gaps of large movable tensors, including tensors that no op of the step uses.

    A tensor without uses has a gap from -1 to n_ops, with an idle time of one step.
    """
    gaps = trace.gaps
    keep = trace.movable[gaps.tensor]
    unused = np.diff(trace.use_start) == 0
    idle = np.flatnonzero(trace.movable & unused & (trace.kind == Kind.PERSISTENT))
    return Gaps(
        np.concatenate((gaps.tensor[keep], idle)),
        np.concatenate((gaps.start[keep], np.full(len(idle), -1))),
        np.concatenate((gaps.end[keep], np.full(len(idle), trace.n_ops))),
        np.concatenate((gaps.idle_us[keep], np.full(len(idle), trace.compute_us))),
    )


def all_gaps(trace: StepTrace) -> Gaps:
    """Return the movable gaps, including those that need a transfer in at most one direction.

    A tensor may stay alive after its last use: its gap lasts to the end of its lifetime (`end` is
    the op after `last`). A tensor carried over from the step before may be out until its first use,
    or its end: `start` is -1.
    """
    gaps = movable_gaps(trace)
    used = np.flatnonzero(trace.movable & (np.diff(trace.use_start) > 0))
    tails = used[np.isin(trace.kind[used], (Kind.TRANSIENT, Kind.MADE))]
    left = trace.access_op[trace.use_order[trace.use_start[tails + 1] - 1]]
    heads = np.flatnonzero(trace.movable & (trace.kind == Kind.CARRIED))
    due = trace.last[heads] + 1
    waits = np.diff(trace.use_start)[heads] > 0
    due[waits] = trace.access_op[trace.use_order[trace.use_start[heads[waits]]]]
    tensor = np.concatenate((tails, heads))
    start = np.concatenate((left, np.full(len(heads), -1)))
    end = np.concatenate((trace.last[tails] + 1, due))
    inside = end - start > 1
    tensor, start, end = tensor[inside], start[inside], end[inside]
    idle_us = trace.begin_us[end] - trace.begin_us[start + 1]
    return joined(gaps, Gaps(tensor, start, end, idle_us))


def bytes_over(gaps: Gaps, amount: Ints, n_ops: int) -> Ints:
    """Sum `amount` of the gaps that each op is inside, around the step's end: [n_ops]."""
    change = np.zeros(2 * n_ops + 1, np.int64)
    np.add.at(change, gaps.start + 1, amount)
    np.add.at(change, gaps.end, -amount)
    total = np.cumsum(change)
    return total[:n_ops] + total[n_ops : 2 * n_ops]


def select(gaps: Gaps, index: Ints) -> Gaps:
    """Return these gaps, in this order."""
    return Gaps(gaps.tensor[index], gaps.start[index], gaps.end[index], gaps.idle_us[index])


def joined(first: Gaps, second: Gaps) -> Gaps:
    """Return the gaps of both, in this order."""
    return Gaps(
        np.concatenate((first.tensor, second.tensor)),
        np.concatenate((first.start, second.start)),
        np.concatenate((first.end, second.end)),
        np.concatenate((first.idle_us, second.idle_us)),
    )
