"""Lower bounds by linear programs (HiGHS): tighter than bounds.py, and slower.

The model is that of bounds.py. Both relax it further: parts of a tensor may move, and a MADE tensor
costs nothing across the end of the step. So a solution exists for whatever an engine does on
average over steps, and the optimum is below it, up to the solver's tolerance (1e-7).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..devices import DeviceProfile
from ..trace.step import Floats, Ints, StepTrace
from ..units import MIB
from .bounds import closed_form_floor, excess_bytes
from .linear_program import Program
from .spans import Spans

_US = 1000.0  # the programs reckon in MiB and ms, which keeps their numbers near 1
_MAX_VARIABLES = 30_000


def lp_bytes(trace: StepTrace, capacity: int, *, time_limit_s: float = 60.0) -> float:
    """Bytes in a step at least, in steady state: offline paging of tensors of any size, relaxed.

    min sum x_g, where x_g of gap g's bytes are away: 0 <= x_g <= bytes_g, and at each op t the
    x_g of the gaps that span it sum up to E_t >= S_t + W_t - capacity. In difference form,
    E_t = E_(t-1) + starts - ends, an interval has two nonzeros (a network matrix); the circle is
    closed by one row that sums up E_0. It is the LP of Albers, Arora and Khanna ("Page
    replacement for general caching problems", 1999) on a circle.
    At least `cut_bound`, `disjoint_cuts` and `pfoo_l`.

    Raises:
        PlanError: an op accesses more than `capacity`, or the time limit is over.
        NotSupportedError: highspy is not installed.
    """
    spans = Spans(trace)
    excess = excess_bytes(spans, capacity)
    over = np.flatnonzero(excess)
    if not len(over):
        return 0.0
    start, end, size = _over_runs(trace, over)
    cuts = np.unique(np.concatenate(([0], start, end % len(over))))  # between them the gaps are one
    least = np.maximum.reduceat(excess[over], cuts) / MIB
    rows, gaps = len(cuts), len(size)
    first, last = np.searchsorted(cuts, start), np.searchsorted(cuts, end % len(over))
    around = end > len(over)  # they span run 0, whose row says what E_0 is
    at_zero = around | (first == 0)
    program = Program()
    away = program.variables(gaps, cost=1.0, upper=size / MIB)
    # The upper bounds say nothing new, but without them the solver may call it infeasible.
    total = program.variables(rows, lower=least, upper=spans.held[over[cuts]] / MIB)
    run = np.arange(rows)
    program.add(run, total, 1.0)
    program.add(run[1:], total[:-1], -1.0)
    program.add(first[first > 0], away[first > 0], -1.0)
    program.add(last[last > 0], away[last > 0], 1.0)
    program.add(np.zeros(int(at_zero.sum()), np.int64), away[at_zero], -1.0)
    return program.minimum(equal=np.zeros(rows), time_limit_s=time_limit_s) * MIB


def _over_runs(trace: StepTrace, over: Ints) -> tuple[Ints, Ints, Ints]:
    """The gaps in ranks of the ops `over` capacity that they span: [start, end), and bytes.

    Starts are below the count of these ops; gaps of equal span are one.
    """
    gaps, n, count = trace.gaps, trace.n_ops, len(over)
    twice = np.concatenate((over, over + n))
    start = np.searchsorted(twice, gaps.start, side="right")
    end = np.searchsorted(twice, gaps.end, side="left")
    spans = end > start
    shift = np.where(start >= count, count, 0)
    pairs = np.stack((start - shift, end - shift), axis=1)[spans]
    unique, index = np.unique(pairs, axis=0, return_inverse=True)
    size = np.bincount(index.reshape(-1), weights=trace.bytes[gaps.tensor[spans]])
    return unique[:, 0], unique[:, 1], size.astype(np.int64)


def lp_time_floor(
    trace: StepTrace,
    device: DeviceProfile,
    capacity: int,
    *,
    windows: int = 64,
    time_limit_s: float = 60.0,
) -> float:
    """The step time in µs that no swapping schedule is below, in steady state, by windows.

    The step is cut at M instants, each inside the op of highest pressure of one of M time slices.
    At each instant enough is away; between two, in a window, what comes in and what is written
    back fit the link in the window's compute time and its stall. Variables, in bytes of tensors
    whose gaps are alike: away at each instant, come in in each window, and written back by each
    instant, from the write on and once for all gaps until the next write. Minimises the sum of
    stalls. The instant is anywhere in its op, and within a window moves are in any order, which
    is the relaxation. The result is at least `closed_form_floor`: the larger of both.

    With more than 30,000 variables there are fewer windows, which is looser and holds as well.

    Raises:
        PlanError: an op accesses more than `capacity`, or the time limit is over.
        NotSupportedError: highspy is not installed.
    """
    floor = closed_form_floor(trace, device, capacity)
    spans = Spans(trace)
    excess = excess_bytes(spans, capacity)
    if not excess.any():
        return floor.us
    while True:
        instants = instants_of(trace, spans.need, windows, floor.op)
        groups = list(_groups(spans, instants))
        if windows <= 8 or sum(group.variables for group in groups) <= _MAX_VARIABLES:
            break
        windows = windows * 3 // 4
    program = Program()
    link = _Link(program, trace, device, instants)
    for group in groups:
        link.move(group)
    stall = link.stall_us(excess[instants], time_limit_s)
    return max(floor.us, trace.compute_us + stall)


def instants_of(trace: StepTrace, need: Ints, windows: int, also: int) -> Ints:
    """The op of the highest need in each time slice, and op `also` unless it is -1."""
    middle = (trace.begin_us[:-1] + trace.begin_us[1:]) / 2
    width = max(trace.compute_us, 1e-9) / windows
    piece = np.minimum((middle / width).astype(np.int64), windows - 1)
    order = np.lexsort((need, piece))
    best = order[np.flatnonzero(np.diff(piece[order], append=windows))]
    return np.unique(np.append(best, also) if also >= 0 else best)


@dataclass
class _Group:
    """Tensors whose gaps lie alike among the instants: their sum moves as one.

    `gaps`: instants from and to (excluded) that each gap spans, in order and not overlapping;
    `written`: the first instant after the write, or None where no write-back is needed. Beyond M,
    instants are of the next step.
    """

    gaps: tuple[tuple[int, int], ...]
    written: int | None
    mib: float = 0.0

    @property
    def variables(self) -> int:
        """How many, without those that a gap's last window saves."""
        out = 0 if self.written is None else self.gaps[-1][1] - self.written
        return out + sum(2 * (end - start) - 1 for start, end in self.gaps)


def _groups(spans: Spans, instants: Ints) -> Iterator[_Group]:
    """The gaps that span an instant: by the write they hold, and alike ones summed up."""
    gaps, n, count = spans.trace.gaps, spans.trace.n_ops, len(instants)
    places = np.concatenate((instants, instants + n, instants + 2 * n))
    shift = np.where(spans.write_op < 0, n, 0)  # a write of the step before is one of this step
    start = np.searchsorted(places, gaps.start + shift, side="right")
    end = np.searchsorted(places, gaps.end + shift, side="left")
    written = np.searchsorted(places, spans.write_op + shift, side="right")
    held: dict[int, list[int]] = {}
    for g in np.flatnonzero(end > start).tolist():
        version = int(spans.version[g])
        held.setdefault(version if version >= 0 else -1 - g, []).append(g)
    groups: dict[tuple[tuple[tuple[int, int], ...], int | None], float] = {}
    for version, members in held.items():
        ranges = tuple(sorted((int(start[g]), int(end[g])) for g in members))
        after = int(written[members[0]]) if version >= 0 else None
        back = min(ranges[0][0], ranges[0][0] if after is None else after) // count * count
        key = (
            tuple((a - back, b - back) for a, b in ranges),
            None if after is None else after - back,
        )
        groups[key] = groups.get(key, 0.0) + float(spans.bytes[members[0]]) / MIB
    for (ranges, after), mib in groups.items():
        yield _Group(ranges, after, mib)


class _Link:
    """The windows' rows: what is away at each instant, and what moves in each window."""

    def __init__(
        self, program: Program, trace: StepTrace, device: DeviceProfile, instants: Ints
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
        """Adds one group's variables."""
        program, lane = self._program, self._lanes[0][0]
        copy = self._write_back(group)
        for start, end in group.gaps:
            at = np.arange(start, end)
            away = program.variables(len(at), upper=group.mib)
            program.add(self._away[at % self._count], away, -1.0)
            program.add(lane[at[-1:] % self._count], away[-1:], 1.0)  # the rest, in the last window
            back = program.variables(len(at) - 1)
            row = program.rows(len(at) - 1)  # away now - away next <= what comes in
            program.add(row, away[:-1], 1.0)
            program.add(row, away[1:], -1.0)
            program.add(row, back, -1.0)
            program.add(lane[at[:-1] % self._count], back, 1.0)
            if copy is not None and group.written is not None:
                row = program.rows(len(at))
                program.add(row, away, 1.0)
                program.add(row, copy[at - group.written], -1.0)

    def _write_back(self, group: _Group) -> Ints | None:
        """What has a copy on the host at each instant after the write; grows over the windows."""
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
        """The least sum of stalls."""
        least: Floats = np.zeros(self._program.n_rows)
        least[self._away] = -excess / MIB
        for lane, mib_per_ms in self._lanes:
            least[lane] = self._us / _US * mib_per_ms
        return self._program.minimum(at_most=least, time_limit_s=time_limit_s) * _US
