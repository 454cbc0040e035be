"""A replayed step in time: its ops and stalls, the link's lanes, and which pages are where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..base.device_profiles import DeviceProfile
from ..base.units import PAGE_BYTES
from ..simulation.replay import Logged, Result
from ..trace.step_trace import Bools, Floats, Ints, Kind, StepTrace

OTHER = -1  # pages of no large tensor: segments of small ones


class MoveKind(IntEnum):
    """The kind of a move of pages, as in src/soft/move_log.h."""

    HELD = 0  # on the device as the step begins
    FILL = 1  # gets memory on the device without contents from the host
    IN = 2
    OUT = 3
    COPY = 4  # out, and remains on the device
    DROP = 5  # leaves without a copy: the host has the same contents
    DISCARD = 6  # its contents are dead
    FREE = 7
    HOST = 8  # the host works on it


_ARRIVES = (MoveKind.HELD, MoveKind.FILL, MoveKind.IN)
_LEAVES = (MoveKind.OUT, MoveKind.DROP, MoveKind.DISCARD, MoveKind.FREE)


class Moves(NamedTuple):
    """Moves in program order, each of adjacent pages of one tensor. Columns of equal length."""

    kind: Ints
    tensor: Ints  # OTHER for none
    page: Ints  # the first
    pages: Ints
    op: Ints  # issued before or during it
    issued_us: Floats
    start_us: Floats  # on the lane
    end_us: Floats
    fault: Bools
    unused: Bools  # fetched from the host, and now leaves or dies without an access

    def only(self, *kinds: MoveKind) -> Moves:
        """Return the moves of these kinds."""
        return self.where(np.isin(self.kind, kinds))

    def where(self, chosen: Bools | Ints) -> Moves:
        """Return the chosen moves: those of a mask, or in the order of indices."""
        return Moves(*(column[chosen] for column in self))  # type: ignore[arg-type]


class Changes(NamedTuple):
    """Pages that a tensor gains on the device (`pages` > 0) or loses, in time order."""

    us: Floats
    tensor: Ints
    pages: Ints


@dataclass(frozen=True)
class Timeline:
    """One step of a replay; times in µs since the step began."""

    step: StepTrace
    device: DeviceProfile
    result: Result
    end_us: Floats  # [n] per op
    moves: Moves
    early: Moves  # of the previous step, which end in this one: for the lanes alone
    placed: Ints  # [m] first page of each tensor; -1: nowhere, or it is small

    @cached_property
    def start_us(self) -> Floats:
        """[n] The start of each op's compute, after its waits."""
        return np.maximum(self.end_us - self.step.op_us, self.wait_us)

    @cached_property
    def wait_us(self) -> Floats:
        """[n] The end of the previous op, when the op's wait begins."""
        return np.concatenate(([0.0], self.end_us[:-1]))

    @cached_property
    def stall_us(self) -> Floats:
        """[n] The wait of each op."""
        return np.where(
            self._rounding(self.start_us - self.wait_us), 0.0, self.start_us - self.wait_us
        )

    @staticmethod
    def _rounding(us: Floats) -> Bools:
        """Return where a duration is within the rounding errors of sums of times in µs."""
        return us < 1e-3

    def lane(self, *kinds: MoveKind) -> Moves:
        """Return a lane's moves in time order, beginning with the step."""
        both = (self.early.only(*kinds), self.moves.only(*kinds))
        joined = Moves(*(np.concatenate(columns) for columns in zip(*both, strict=True)))
        order = np.argsort(joined.start_us, kind="stable")
        ordered = joined.where(order)
        return ordered._replace(start_us=np.maximum(ordered.start_us, 0.0))

    @cached_property
    def changes(self) -> Changes:
        """Residency of all tensors, from each page's events and the tensors' lifetimes.

        A page remains on the device when its tensor dies, until it is discarded or another tensor
        has its memory: until then it is OTHER's.
        """
        return _changes(self)


def of(step: StepTrace, device: DeviceProfile, logged: Logged) -> Timeline:
    """Return the timeline of a logged replay of this step."""
    columns = logged.moves
    known = step.large & (logged.placed > 0)
    placed = np.where(known, (logged.placed - columns["base"]) // PAGE_BYTES, -1)
    moves = _owned(step, placed, columns)
    return Timeline(
        step,
        device,
        logged.result,
        logged.op_end_us,
        moves.where(moves.op >= 0),
        moves.where(moves.op < 0),
        placed,
    )


class _Runs:
    """Pages in runs: no tensor and no move begins or ends inside one, so its pages move alike."""

    def __init__(self, step: StepTrace, placed: Ints, page: Ints, pages: Ints) -> None:
        self._tensor = np.flatnonzero(placed >= 0)
        self._page = placed[self._tensor]
        self._pages = step.bytes[self._tensor] // PAGE_BYTES
        borders = (self._page, self._page + self._pages, page, page + pages)
        at = np.sort(np.concatenate(borders))  # np.unique hashes, and is slower
        self.first = at[np.diff(at, prepend=-1) > 0]  # page of each run; the last is none
        self.pages = np.diff(self.first, append=self.first[-1:])

    def of(self, page: Ints, pages: Ints) -> tuple[Ints, Ints]:
        """Return all runs of rows of adjacent pages in turn, and the row of each."""
        begin = np.searchsorted(self.first, page)
        count = np.searchsorted(self.first, page + pages) - begin
        row = np.repeat(np.arange(len(count)), count)
        return np.arange(len(row)) + (begin - np.cumsum(count) + count)[row], row

    def of_tensors(self) -> tuple[Ints, Ints]:
        """Return the runs of all placed tensors, and the tensor of each."""
        run, row = self.of(self._page, self._pages)
        return run, self._tensor[row]


def _lifetime(step: StepTrace) -> tuple[Ints, Ints]:
    """Return the op before which each tensor begins, -1 if before the step, and its last one."""
    begins = np.isin(step.kind, (Kind.TRANSIENT, Kind.MADE))
    ends = np.isin(step.kind, (Kind.TRANSIENT, Kind.CARRIED))
    return np.where(begins, step.first, -1), np.where(ends, step.last, step.n_ops)


def _owned(step: StepTrace, placed: Ints, columns: Mapping[str, Any]) -> Moves:
    """Cut moves at the borders of tensors, and name the tensor of each."""
    runs = _Runs(step, placed, columns["page"], columns["pages"])
    run, row = runs.of(columns["page"], columns["pages"])
    kind, op = columns["kind"][row], columns["operation"][row]
    run_of, tensor_of = runs.of_tensors()
    first, last = _lifetime(step)
    # Memory is filled for a tensor of this op; all else happens to one of an earlier op.
    seen = np.where(kind == MoveKind.FILL, op, np.maximum(op - 1, -1))
    scale = step.n_ops + 3
    keys = run_of * scale + first[tensor_of] + 1
    order = np.argsort(keys, kind="stable")
    at = np.searchsorted(keys[order], run * scale + seen + 1, side="right") - 1
    owner = np.full(len(run), OTHER, np.int64)
    if len(order):
        found = order[np.maximum(at, 0)]
        right = (at >= 0) & (run_of[found] == run)
        # Dead pages remain until their memory is needed: their tensor has died before.
        dead = np.isin(kind, (MoveKind.DISCARD, MoveKind.FREE))
        right &= dead | (last[tensor_of[found]] >= seen - 1)
        owner[right] = tensor_of[found][right]
    new = np.ones(len(row), bool)
    new[1:] = (row[1:] != row[:-1]) | (owner[1:] != owner[:-1])
    start = np.flatnonzero(new)
    pages = np.add.reduceat(runs.pages[run], start) if len(start) else start
    at_row, page = row[start], runs.first[run[start]]
    # A row's time on its lane is that of its pages, one after another.
    share = (columns["end_us"] - columns["start_us"]) / np.maximum(columns["pages"], 1)
    before = page - columns["page"][at_row]
    begin = columns["start_us"][at_row] + before * share[at_row]
    return Moves(
        kind=kind[start],
        tensor=owner[start],
        page=page,
        pages=pages,
        op=op[start],
        issued_us=columns["issued_us"][at_row],
        start_us=begin,
        end_us=begin + pages * share[at_row],
        fault=columns["fault"][at_row],
        unused=columns["unused"][at_row],
    )


def _changes(line: Timeline) -> Changes:
    step = line.step
    log = line.moves.only(*_ARRIVES, *_LEAVES)
    runs = _Runs(step, line.placed, log.page, log.pages)
    run_of, tensor_of = runs.of_tensors()
    logged, row = runs.of(log.page, log.pages)
    first, last = _lifetime(step)
    begin_of_op = np.append(line.wait_us, line.end_us[-1:])  # and the step's end
    dies = last[tensor_of] < step.n_ops
    # Events of pages, in this order within an op: its tensor ends, another begins, or it moves.
    end_op, begin_op = last[tensor_of][dies] + 1, first[tensor_of]
    events = [
        (run_of[dies], end_op, begin_of_op[end_op]),
        (run_of, begin_op, begin_of_op[np.maximum(begin_op, 0)]),
        (logged, log.op[row], log.issued_us[row]),
    ]
    run, op, us = (np.concatenate(columns) for columns in zip(*events, strict=True))
    rank = np.repeat(np.arange(3), [len(one[0]) for one in events])
    says = np.full(len(rank), -2)  # -2: unchanged
    owner, there = says.copy(), says
    owner[rank == 0], owner[rank == 1] = OTHER, tensor_of
    there[rank == 2] = np.isin(log.kind[row], _ARRIVES)
    # Stable: events of the log remain in order.
    order = np.argsort((run * (step.n_ops + 3) + op + 1) * 3 + rank, kind="stable")
    run, us, owner, there = run[order], us[order], owner[order], there[order]
    new_run = np.diff(run, prepend=-1) != 0
    owner = _carried(owner, new_run, OTHER)
    there = _carried(there, new_run, 0)
    here = np.where(there == 1, owner, -2)
    before = np.where(new_run, -2, np.concatenate(([-2], here[:-1])))
    gone = np.flatnonzero((here != before) & (before > -2))
    come = np.flatnonzero((here != before) & (here > -2))
    at = np.concatenate((gone, come))
    pages = runs.pages[run[at]]
    pages[: len(gone)] *= -1
    tensor = np.concatenate((before[gone], here[come]))
    order = np.argsort(us[at], kind="stable")  # losses first within a moment
    return Changes(us[at][order], tensor[order], pages[order])


def _carried(values: Ints, new_group: Bools, default: int) -> Ints:
    """Replace each -2 by the value before it in its group, or by the default."""
    at = np.where((values != -2) | new_group, np.arange(len(values)), 0)
    filled = values[np.maximum.accumulate(at)]
    return np.where(filled == -2, default, filled)
