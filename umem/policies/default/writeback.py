"""Early write-back: copies to the host, made while the link is idle, of tensors that leave later.

Managed memory has one home for a page, except for read-mostly ranges: once nothing writes a tensor
before it leaves, a copy can be made while the link is idle, and the eviction needs no transfer.
Source: the pre-clean of page replacement (Tanenbaum, "Modern Operating Systems", paging daemon).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...trace.step_trace import Gaps, Ints, Kind, StepTrace
from ..base import Entries, WriteBack

NEVER = 1 << 31


class Quiet(NamedTuple):
    """Times between two writes of a tensor in which it leaves. Columns of equal length.

    Ops count from the start of the step in which the tensor is next written, or freed; negative
    ones are in the step before.
    """

    tensor: Ints
    written: Ints  # the op of the last write before
    due: Ints  # the op after which it leaves first
    until: Ints  # the op of the next write; `NEVER`: it is freed first
    leaves: Ints  # the number of times it leaves between the writes
    of_gap: Ints  # [gaps] the row of each gap; -1: none is known


def quiet_times(trace: StepTrace, away: Gaps) -> Quiet:
    """Return the quiet times of the tensors that leave in the gaps.

    Tensors that the step does not write have none, nor do those carried over from the step before
    until they are written.
    """
    n, rows = trace.n_ops, len(away.tensor)
    scale = 2 * n  # keeps the keys of different tensors apart
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


def write_backs(quiet: Quiet, copied: Ints, n_ops: int) -> Entries[WriteBack]:
    """Return the write-backs of the plan.

    `copied` is the op with which the link starts the write-back, or `NEVER`; a tensor that leaves
    several times then keeps the copy that its first eviction makes.
    """
    after = np.where(copied < NEVER, copied - 1, quiet.due)
    wanted = np.flatnonzero((copied < NEVER) | (quiet.leaves > 1))
    wanted = wanted[np.argsort(after[wanted] % n_ops, kind="stable")]
    earlier = np.where(after[wanted] < -1, n_ops, 0)  # it starts in the step before
    until = np.where(quiet.until[wanted] == NEVER, 2 * n_ops, quiet.until[wanted] + earlier)
    return Entries(WriteBack, after[wanted] + earlier, until, quiet.tensor[wanted])
