"""Single bounds of bytes in, each for a step and a capacity."""

from __future__ import annotations

import numpy as np

from umem.analysis import bounds
from umem.analysis.idle_intervals import IdleIntervals
from umem.trace.step_trace import StepTrace


def largest_cut(trace: StepTrace, capacity: int) -> int:
    """The max over ops of the bytes swapped out there that come in again."""
    spans = IdleIntervals(trace.in_exact_parts)
    return int(np.max(bounds.excess_bytes(spans, capacity) - spans.unread, initial=0))


def disjoint_cuts(trace: StepTrace, capacity: int) -> bounds.Cut:
    """Cuts that add up."""
    spans = IdleIntervals(trace.in_exact_parts)
    return bounds.disjoint_cuts(spans, bounds.excess_bytes(spans, capacity))


def pfoo_l(trace: StepTrace, capacity: int) -> float:
    """Space over time."""
    return bounds.pfoo_l(IdleIntervals(trace.in_exact_parts), capacity)
