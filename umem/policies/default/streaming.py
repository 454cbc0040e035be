"""Choice of the weights to stream where a step reads all of them once, in a cycle."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...trace.step_trace import Gaps, Ints, StepTrace
from .choice import choose
from .occupancy import bytes_over, select

BUFFERS = (1, 2, 4)  # free space to try, in units of the largest tensor that moves
LARGE = 1.5  # times the size that half of the bytes are in tensors up to: larger ones stay


def streamed(trace: StepTrace, gaps: Gaps, live: Ints, room: int) -> Iterator[Ints]:
    """Yield gaps of clean tensors around the step's end, evenly spaced, with space for buffers.

    In a cycle all idle times are equal, and the smallest set to swap out, wherever it is, leaves
    the link idle: a tensor can start only when the one before it has left. Evenly spaced tensors
    with space for the next two keep it busy. Much larger tensors are kept where possible, because
    each waits until as many bytes have left. Yields nothing if clean tensors are less than half of
    the bytes that have to leave. Source: the schedule of `stream_layers` (Han et al., ACL 2022), in
    tensors.
    """
    around = (gaps.start >= 0) & (gaps.end >= trace.n_ops) & trace.clean[gaps.tensor]
    index = np.flatnonzero(around)
    index = index[np.argsort(gaps.start[index], kind="stable")]
    amount = trace.bytes[gaps.tensor[index]]
    excess = int(live.max(initial=0)) - room
    if excess <= 0 or 2 * int(amount.sum()) < excess:
        return
    ascending = np.sort(amount)
    middle = ascending[np.searchsorted(np.cumsum(ascending), ascending.sum() / 2)]
    near = amount <= LARGE * middle
    unit = int(amount[near].max())
    if int(amount[near].sum()) >= excess + unit:
        index, amount = index[near], amount[near]
    for buffers in BUFFERS:
        moving = index[_spread(amount, (excess + buffers * unit) / float(amount.sum()))]
        away = select(gaps, moving)
        over = live - bytes_over(away, trace.bytes[away.tensor], trace.n_ops) - room
        every = moving
        if over.max() > 0:
            others = np.setdiff1d(np.arange(len(gaps.tensor)), moving)
            left = select(gaps, others)
            every = np.concatenate((moving, others[choose(trace, left, over, left.idle_us)]))
        yield every[np.lexsort((gaps.tensor[every], gaps.start[every]))]


def _spread(amount: Ints, share: float) -> Ints:
    """Return evenly spaced indices that hold about that share of the bytes."""
    due = 0.0
    taken = []
    for i, size in enumerate(amount.tolist()):
        due += size * share
        if due >= size / 2:
            taken.append(i)
            due -= size
    return np.array(taken, np.int64)
