"""Which gaps are spent away: greedily by a priority, then none that is not needed."""

from __future__ import annotations

import numpy as np

from ..trace.step import Floats, Gaps, Ints, StepTrace


def choose(trace: StepTrace, gaps: Gaps, excess: Ints, priority: Floats) -> Ints:
    """The gaps to be away in: after them no op is over, as far as gaps can help.

    First goes each gap inside which an op is over by all of its bytes, then each inside which one
    is over at all. Then they are looked at again, the shortest idle time first: where all ops
    inside have room, the tensor stays.

    Args:
        trace: the step.
        gaps: of large tensors.
        excess: [n_ops] bytes over the capacity when nothing leaves; below 0 there is room.
        priority: of each gap, the highest goes first.

    Returns:
        Indices into `gaps`, ascending by `start`.
    """
    from ..native import core

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
