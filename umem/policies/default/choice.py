"""Greedy choice of the gaps in which tensors are swapped out; needless gaps are dropped again."""

from __future__ import annotations

import numpy as np

from ...trace.step_trace import Floats, Gaps, Ints, StepTrace


def choose(trace: StepTrace, gaps: Gaps, excess: Ints, priority: Floats) -> Ints:
    """Choose the gaps to spend swapped out, so that no op exceeds the capacity if gaps allow it.

    Gaps inside which an op exceeds the capacity by at least the tensor's size come first, then gaps
    inside which an op exceeds it at all. A second pass, in the order of idle time, shortest first,
    keeps each tensor whose ops inside all have room for it.

    Args:
        trace: the step.
        gaps: of large tensors.
        excess: [n_ops] bytes over the capacity when nothing is evicted; negative: free.
        priority: of each gap; the highest is chosen first.

    Returns:
        Indices into `gaps`, ascending by `start`.
    """
    from ...base.native import core

    hot = np.flatnonzero(excess > 0)  # leaving helps these ops only, and staying hurts no other
    begin = np.searchsorted(hot, gaps.start + 1)
    end = np.searchsorted(hot, np.minimum(gaps.end, trace.n_ops))
    wrap = np.searchsorted(hot, gaps.end - trace.n_ops)
    useful = np.flatnonzero((end > begin) | (wrap > 0))
    order = useful[np.lexsort((gaps.start[useful], gaps.tensor[useful], -priority[useful]))]
    away = core.choose_gaps(
        begin, end, wrap, trace.bytes[gaps.tensor], gaps.idle_us, excess[hot], order
    )
    return away[np.lexsort((gaps.tensor[away], gaps.start[away]))]
