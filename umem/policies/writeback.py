"""Early write-back: copies on the host made while the link out is idle, of what leaves later.

Managed memory has one home for a page, but for what is read-mostly: once nothing writes a tensor
any more until it leaves, a copy of it can be made at leisure, and then it leaves at once.
Source: the pre-clean of page replacement (Tanenbaum, "Modern Operating Systems", paging daemon).
"""

from __future__ import annotations

from heapq import heappop, heappush
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


class Copies:
    """Which copies are valid while time goes on, and which the idle link makes next.

    Ops count from the begin of the first of several equal steps of `n_ops`.
    """

    def __init__(self, quiet: Quiet, out_us: list[float], n_ops: int) -> None:
        self._n = n_ops
        self._out_us = out_us
        self._written: list[int] = quiet.written.tolist()
        self._due: list[int] = quiet.due.tolist()
        self._of_step = [-1] * len(out_us)  # in which step the quiet time ends that it is valid in
        self._done = [0.0] * len(out_us)
        self._started = [NEVER] * len(out_us)
        self._waiting: list[tuple[int, int, int]] = []  # (due, which, step), the first due first
        self._enter: dict[int, list[int]] = {}
        for i, (written, due) in enumerate(zip(self._written, self._due, strict=True)):
            if due > written:  # else it leaves as soon as it has been written
                self._enter.setdefault((written + 1) % n_ops, []).append(i)
                if written < -1:
                    heappush(self._waiting, (due, i, 0))

    def ready(self, which: int, op: int) -> float | None:
        """When the copy was complete that makes a tensor free to leave after `op`; None: none."""
        valid = which >= 0 and self._of_step[which] == self._step(which, op)
        return self._done[which] if valid else None

    def moved(self, which: int, op: int, when: float) -> None:
        """It left after `op` with a transfer that ended then: the host has a copy from there on."""
        if which >= 0:
            self._of_step[which], self._done[which] = self._step(which, op), when

    def fill(self, op: int, free: float, end: float) -> float:
        """During `op`, which ends at `end`, the link is idle from `free` on: until when is it not.

        Copies start as long as it is idle.
        """
        for which in self._enter.get(op % self._n, ()):
            step = self._step(which, op - 1)
            heappush(self._waiting, (self._due[which] + step * self._n, which, step))
        while self._waiting and free < end:
            due, which, step = heappop(self._waiting)
            if due < op or self._of_step[which] == step:
                continue
            free += self._out_us[which]
            self._of_step[which], self._done[which] = step, free
            self._started[which] = op - step * self._n
        return free

    def started(self) -> Ints:
        """[quiet times] The op with which each copy starts, as `Quiet` counts; NEVER: none does."""
        return np.array(self._started, np.int64)

    def _step(self, which: int, op: int) -> int:
        return (op - self._written[which]) // self._n
