"""Early write-back: copies on the host made while the link out is idle, of what leaves later.

Managed memory has one home for a page, but for what is read-mostly: once nothing writes a tensor
any more until it leaves, a copy of it can be made at leisure, and then it leaves at once.
Source: the pre-clean of page replacement (Tanenbaum, "Modern Operating Systems", paging daemon).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..trace.step import Gaps, Ints, Kind, StepTrace
from .base import Copy

NEVER = 1 << 31


class Quiet(NamedTuple):
    """The times between two writes of a tensor in which it leaves. Columns of equal length.

    Ops count from the begin of the step in which the tensor is written next, or dies: what is below
    0 lies in the step before.
    """

    tensor: Ints
    written: Ints  # the op of the last write before
    due: Ints  # the op after which it leaves first
    until: Ints  # the op of the next write; `NEVER`: it dies first
    leaves: Ints  # how often it leaves in that time
    of_gap: Ints  # [gaps] in which of these each gap lies; -1: none is known


def quiet_times(trace: StepTrace, away: Gaps) -> Quiet:
    """When what leaves in the gaps has been written, and when it will be.

    Nothing is said of a tensor that the step does not write, and of one carried over from the step
    before until it is written.
    """
    n, rows = trace.n_ops, len(away.tensor)
    scale = 2 * n  # apart, by tensor
    written = trace.use_order[trace.access_write[trace.use_order]]
    writes = trace.access_tensor[written] * scale + trace.access_op[written]  # ascending
    persistent = trace.kind[away.tensor] == Kind.PERSISTENT
    place = np.searchsorted(writes, away.tensor * scale + away.start, side="right")
    begin = np.searchsorted(writes, away.tensor * scale)
    end = np.searchsorted(writes, (away.tensor + 1) * scale)
    ops = np.append(writes % scale, 0)
    earlier, later = place > begin, place < end
    before = np.where(earlier, ops[place - 1], ops[end - 1] - n)
    after = np.where(later, ops[np.minimum(place, len(writes))], NEVER)
    shift = np.zeros(rows, np.int64)
    around = persistent & ~later & (end > begin)  # the next write is the first of the next step
    shift[around] = n
    after[around] = ops[begin[around]]
    known = (end > begin) & (earlier | persistent)
    return _grouped(away, before - shift, away.start - shift, after, np.flatnonzero(known))


def _grouped(away: Gaps, before: Ints, due: Ints, after: Ints, rows: Ints) -> Quiet:
    keys = away.tensor[rows] * (NEVER + 1) + after[rows]
    _, first, group, leaves = np.unique(
        keys, return_index=True, return_inverse=True, return_counts=True
    )
    of_gap = np.full(len(away.tensor), -1)
    of_gap[rows] = group
    earliest = np.full(len(first), NEVER)
    np.minimum.at(earliest, group, due[rows])
    one = rows[first]
    return Quiet(away.tensor[one], before[one], earliest, after[one], leaves, of_gap)


def write_backs(quiet: Quiet, copied: Ints, n_ops: int) -> tuple[Copy, ...]:
    """What a plan has to say so that the copies are there.

    `copied` is the op with which the link starts to write back, `NEVER` where it does not; a tensor
    that leaves several times then keeps the copy that its first way out makes.
    """
    after = np.where(copied < NEVER, copied - 1, quiet.due)
    wanted = np.flatnonzero((copied < NEVER) | (quiet.leaves > 1))
    wanted = wanted[np.argsort(after[wanted] % n_ops, kind="stable")]
    earlier = np.where(after[wanted] < -1, n_ops, 0)  # begun in the step before
    until = np.where(quiet.until[wanted] == NEVER, 2 * n_ops, quiet.until[wanted] + earlier)
    columns = (after[wanted] + earlier, until, quiet.tensor[wanted])
    return tuple(map(Copy, *(column.tolist() for column in columns)))
