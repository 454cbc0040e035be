"""Lower bounds by linear programs (HiGHS): tighter than those of umem, and slower.

The model is that of `umem.analysis.bounds`. Both programs relax it further: parts of a tensor may
move, and a MADE tensor costs nothing across the end of the step. So whatever an engine does on
average over steps is a feasible solution, and the optimum is at most its cost, up to the solver's
tolerance (1e-7).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from umem.analysis.bounds import (
    closed_form_floor,
    excess_bytes,
    lower_bound_bytes_in,
    lower_bound_bytes_out,
)
from umem.analysis.idle_intervals import IdleIntervals
from umem.analysis.linear_program import LinearProgram
from umem.analysis.turning_points import instants_of
from umem.base.device_profiles import DeviceProfile
from umem.base.units import MIB
from umem.trace.step_trace import Floats, Ints, StepTrace

_US = 1000.0  # the programs use MiB and ms, which keeps their numbers near 1
_MAX_VARIABLES = 30_000
_TOLERANCE = 1e-6  # of the solver


def lp_time_floor(
    trace: StepTrace,
    device: DeviceProfile,
    capacity: int,
    *,
    windows: int = 64,
    time_limit_s: float = 60.0,
) -> float:
    """Return a lower bound of the step time in µs of any swapping schedule, in steady state.

    The step is cut at M instants, each inside the op of highest need of one of M time slices. At
    each instant enough is swapped out; in each window between two instants, what comes in and what
    is written back fit the link within the window's compute time and its stall. The variables, in
    bytes of tensors whose gaps are alike: swapped out at each instant, brought in in each window
    (unless nothing reads them again), and written back by each instant, from the write on and once
    for all gaps until the next write. The program minimises the sum of stalls. It is a relaxation,
    because an instant may be anywhere in its op, and moves within a window have no order. The
    result is the larger of this and `closed_form_floor`.

    With more than 30,000 variables fewer windows are used: the bound is looser, and still holds.

    Raises:
        PlanError: an op accesses more than `capacity`, or the time limit was reached.
        NotSupportedError: highspy is not installed.
    """
    floor = closed_form_floor(trace, device, capacity)
    spans = IdleIntervals(trace.in_exact_parts)
    excess = excess_bytes(spans, capacity)
    if not excess.any():
        return floor.us
    while True:
        instants = instants_of(trace, spans.need, windows, floor.op)
        groups = list(_groups(spans, instants))
        if windows <= 8 or sum(group.variables for group in groups) <= _MAX_VARIABLES:
            break
        windows = windows * 3 // 4
    program = LinearProgram()
    link = _Link(program, trace, device, instants)
    for group in groups:
        link.move(group)
    stall = link.stall_us(excess[instants], time_limit_s)
    return max(floor.us, trace.compute_us + stall)


def lp_bytes_in(trace: StepTrace, capacity: int, *, time_limit_s: float = 60.0) -> int:
    """Return a lower bound of the bytes in per step of any swapping schedule, in steady state.

    The program of offline paging: at each op enough bytes are swapped out of the gaps that span it,
    and what is swapped out at any op of a gap that returns comes in once. The result is the larger
    of its minimum and `bounds.lower_bound_bytes_in`, which cannot add up peaks that a gap spans.

    A step's segments (`trace.segments.with_segments`) leave and return as a whole, as every
    schedule has to move them.

    Raises:
        PlanError: an op accesses more than `capacity`, or the time limit was reached.
        NotSupportedError: highspy is not installed.
    """
    closed = lower_bound_bytes_in(trace, capacity)
    return max(closed, _Paging(trace, capacity).least(time_limit_s))


def lp_bytes_moved(trace: StepTrace, capacity: int, *, time_limit_s: float = 60.0) -> int:
    """Return a lower bound of the bytes per step that come in and go out, together.

    Bytes that are swapped out go out once for all gaps between two writes. There are schedules that
    bring in less and write back more, or the other way round, so this is above the sum of two
    bounds. As `lp_bytes_in` otherwise.

    Raises:
        PlanError: an op accesses more than `capacity`, or the time limit was reached.
        NotSupportedError: highspy is not installed.
    """
    closed = lower_bound_bytes_in(trace, capacity) + lower_bound_bytes_out(trace, capacity)
    paging = _Paging(trace, capacity)
    paging.write_back()
    return max(closed, paging.least(time_limit_s))


class _Paging:
    """The program of offline paging: how many bytes of each gap are swapped out, in MiB."""

    def __init__(self, trace: StepTrace, capacity: int) -> None:
        self._spans = spans = IdleIntervals(trace.in_exact_parts)
        self._program = LinearProgram()
        excess = excess_bytes(spans, capacity)
        self._ops = np.flatnonzero(excess)
        upper = spans.bytes / MIB
        self._out = self._program.variables(len(upper), spans.returns.astype(float), upper=upper)
        if len(self._ops):
            self._at_each_op(excess[self._ops] / MIB, spans.trace.n_ops)

    def _at_each_op(self, least: Floats, n_ops: int) -> None:
        """Require at least `least` MiB swapped out at each op over the capacity.

        The MiB swapped out at such an op are at most those at the one before it, with the gaps that
        begin between the two and without those that end there. For the first op they are a sum.
        """
        program, out, gaps, count = self._program, self._out, self._spans.gaps, len(self._ops)
        at = program.variables(count, lower=least)
        rows = program.rows(count)
        program.add(rows, at, 1.0)
        program.add(rows[1:], at[:-1], -1.0)
        places = np.concatenate((self._ops, self._ops + n_ops))
        first = np.searchsorted(places, gaps.start, side="right")
        end = np.searchsorted(places, gaps.end, side="left")
        spans_first = (first == 0) & (end > 0)  # the first op of this step; `end > count`: the next
        sums = spans_first | (end > count)
        program.add(np.full(sums.sum(), rows[0]), out[sums], -1.0)
        begins = (first > 0) & (first < count) & (end > first)
        program.add(rows[first[begins]], out[begins], -1.0)
        last = np.where(end > count, end - count, end)
        ends = (end > first) & (last < count)
        program.add(rows[last[ends]], out[ends], 1.0)

    def write_back(self) -> None:
        """Count what is written back: of each write's result the most that any gap has out."""
        program, dirty = self._program, np.flatnonzero(self._spans.version >= 0)
        writes, of = np.unique(self._spans.version[dirty], return_inverse=True)
        back = program.variables(len(writes), cost=1.0)
        rows = program.rows(len(dirty))
        program.add(rows, self._out[dirty], 1.0)
        program.add(rows, back[of], -1.0)

    def least(self, time_limit_s: float) -> int:
        """Return the minimum, in bytes."""
        if not len(self._ops):
            return 0
        rows = np.zeros(self._program.n_rows)
        least = self._program.minimum(at_most=rows, time_limit_s=time_limit_s)
        return int(least * (1 - _TOLERANCE) * MIB)


@dataclass
class _Group:
    """Tensors whose gaps span the same instants, so that their sum moves as one.

    `gaps`: the range of instants [from, to) that each gap spans, in order and not overlapping;
    `written`: the first instant after the write, or None where no write-back is needed; `unread`:
    whether the last gap's contents never come in again. Instants from M on are of the next step.
    """

    gaps: tuple[tuple[int, int], ...]
    written: int | None
    unread: bool
    mib: float = 0.0

    @property
    def variables(self) -> int:
        """The number of variables; the last window of a gap needs none of its own."""
        out = 0 if self.written is None else self.gaps[-1][1] - self.written
        return out + sum(2 * (end - start) - 1 for start, end in self.gaps)


def _groups(spans: IdleIntervals, instants: Ints) -> Iterator[_Group]:
    """Yield the gaps that span an instant, grouped by the write they hold; sum alike groups."""
    gaps, n, count = spans.gaps, spans.trace.n_ops, len(instants)
    places = np.concatenate((instants, instants + n, instants + 2 * n))
    shift = np.where(spans.write_op < 0, n, 0)  # so that a write of the step before is not negative
    start = np.searchsorted(places, gaps.start + shift, side="right")
    end = np.searchsorted(places, gaps.end + shift, side="left")
    written = np.searchsorted(places, spans.write_op + shift, side="right")
    held: dict[int, list[int]] = {}
    for g in np.flatnonzero(end > start).tolist():
        version = int(spans.version[g])
        held.setdefault(version if version >= 0 else -1 - g, []).append(g)
    groups: dict[tuple[tuple[tuple[int, int], ...], int | None, bool], float] = {}
    for version, members in held.items():
        ranges = tuple(sorted((int(start[g]), int(end[g])) for g in members))
        after = int(written[members[0]]) if version >= 0 else None
        back = min(ranges[0][0], ranges[0][0] if after is None else after) // count * count
        key = (
            tuple((a - back, b - back) for a, b in ranges),
            None if after is None else after - back,
            not spans.returns[members].all(),
        )
        groups[key] = groups.get(key, 0.0) + float(spans.bytes[members[0]]) / MIB
    for (ranges, after, unread), mib in groups.items():
        yield _Group(ranges, after, unread, mib)


class _Link:
    """The rows of the windows: bytes swapped out at each instant, and moved in each window."""

    def __init__(
        self, program: LinearProgram, trace: StepTrace, device: DeviceProfile, instants: Ints
    ) -> None:
        self._program, self._count = program, len(instants)
        begin = trace.begin_us[instants]
        self._us = np.diff(begin, append=begin[0] + trace.compute_us)
        self._away = program.rows(self._count)
        each = np.arange(self._count)
        self._stall = program.variables(self._count, cost=1.0)
        offset = program.variables(self._count, upper=trace.op_us[instants] / _US)
        self._lanes: list[tuple[Ints, float]] = []
        for speed in (device.bytes_per_us_in, device.bytes_per_us_out):
            mib_per_ms = speed * _US / MIB
            lane = program.rows(self._count)
            program.add(lane, self._stall, -mib_per_ms)
            program.add(lane, offset, mib_per_ms)
            program.add(lane, offset[(each + 1) % self._count], -mib_per_ms)
            self._lanes.append((lane, mib_per_ms))

    def move(self, group: _Group) -> None:
        """Add the variables of one group."""
        program, lane = self._program, self._lanes[0][0]
        copy = self._write_back(group)
        for start, end in group.gaps:
            at = np.arange(start, end)
            away = program.variables(len(at), upper=group.mib)
            program.add(self._away[at % self._count], away, -1.0)
            if copy is not None and group.written is not None:
                row = program.rows(len(at))
                program.add(row, away, 1.0)
                program.add(row, copy[at - group.written], -1.0)
            if group.unread and (start, end) == group.gaps[-1]:
                continue
            program.add(lane[at[-1:] % self._count], away[-1:], 1.0)  # the rest, in the last window
            back = program.variables(len(at) - 1)
            row = program.rows(len(at) - 1)  # away now - away at the next instant <= what comes in
            program.add(row, away[:-1], 1.0)
            program.add(row, away[1:], -1.0)
            program.add(row, back, -1.0)
            program.add(lane[at[:-1] % self._count], back, 1.0)

    def _write_back(self, group: _Group) -> Ints | None:
        """Add and return variables: bytes with a host copy at each instant after the write."""
        if group.written is None:
            return None
        program, lane = self._program, self._lanes[1][0]
        at = np.arange(group.written, group.gaps[-1][1])
        copy = program.variables(len(at), upper=group.mib)
        program.add(lane[(at - 1) % self._count], copy, 1.0)
        program.add(lane[at[:-1] % self._count], copy[:-1], -1.0)
        row = program.rows(len(at) - 1)
        program.add(row, copy[:-1], 1.0)
        program.add(row, copy[1:], -1.0)
        return copy

    def stall_us(self, excess: Ints, time_limit_s: float) -> float:
        """Return the minimum sum of stalls, in µs."""
        least: Floats = np.zeros(self._program.n_rows)
        least[self._away] = -excess / MIB
        for lane, mib_per_ms in self._lanes:
            least[lane] = self._us / _US * mib_per_ms
        return self._program.minimum(at_most=least, time_limit_s=time_limit_s) * _US
