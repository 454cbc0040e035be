"""`auto`, the default policy: the longest idle tensors leave early and return by deadline."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from ...base.device_profiles import DeviceProfile
from ...trace.step_trace import Floats, Gaps, Ints, Kind, StepTrace
from ..base import Entries, Fetch, Move, Plan
from ..published.belady import Belady
from .choice import choose
from .estimate import GapChoice, StepEstimate, estimate
from .host_lane import Updated, updated
from .occupancy import all_gaps, bytes_over, capacity, joined, large_live_bytes, select
from .streaming import streamed
from .writeback import quiet_times, write_backs

COMPARED = 65536  # up to this number of gaps several choices are compared; above it, one is made
FEW = 2  # choices that are compared where an estimate has to be quick
CLEARLY = 0.995  # ratio of times: a smaller gain is not worth moving more bytes
WEIGHT = 0.5  # of a transfer, in steps of idle time


class Auto:
    """Greedy choice of the idle intervals that tensors spend swapped out, longest first.

    Every gap between two uses of a large tensor can be spent swapped out, and so can the rest of
    its lifetime after the last use. In the order of idle time, a gap is chosen if any op inside
    exceeds the capacity; then gaps that turn out to be needless are dropped, shortest first, which
    brings the bytes moved near to their lower bound. Other orders suit some steps better: the
    choice with the min estimated step time is taken. A chosen tensor leaves as soon as its last use
    has ended, and returns in the order of deadlines once the planned occupancy has space for it
    until its next use. A tensor that is not written again before it leaves is written back early
    while the link to the host is idle.

    Source: the interval view of Belady's rule (Belady 1966; Berger, Beckmann and Harchol-Balter,
    "Practical bounds on optimal caching with variable object sizes", SIGMETRICS 2018), with early
    eviction, gated prefetch and early write-back.
    """

    name = "auto"
    rollback = True  # plans are dropped if their first steps are slower than lru's

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:
        """Return a gated plan, without moves where the step fits."""
        trace = trace.pieces
        room = capacity(trace, budget)
        best, found = _best(trace, device, room)
        away = best.away
        moves = np.flatnonzero(away.end > away.start + 1)  # else a gradient, freed once it left
        moves = moves[np.argsort(away.start[moves], kind="stable")]
        # Under pressure others leave as well than those of the plan.
        clean = np.flatnonzero(trace.clean & trace.large & (len(away.tensor) > 0))
        return Plan(
            trace,
            evict=Entries(Move, away.start[moves], away.tensor[moves]),
            fetch=_fetches(trace, best),
            write_back=write_backs(found.quiet, found.copied, trace.n_ops) if found else (),
            read_mostly=tuple(clean.tolist()),
            gated=True,
            occupancy=np.minimum(best.occupancy, room),
            capacity=room,
            order="furthest",
        )

    def second(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:
        """Return the plan to try if the first steps of the other one are bad.

        It evicts on demand, in the order of the furthest next use, without a forecast of memory.
        """
        return Belady().plan(trace, device, budget)

    def estimate_us(
        self, trace: StepTrace, device: DeviceProfile, budget: int, *, compare: bool = True
    ) -> float:
        """Estimate the time of a step under the plan, in µs.

        Without `compare` only a few choices are compared, in less than half the time.
        """
        trace = trace.pieces
        room = capacity(trace, budget)
        _, found = _best(trace, device, room, compare)
        return found.us if found else trace.compute_us


def _best(
    trace: StepTrace, device: DeviceProfile, room: int, compare: bool = True
) -> tuple[GapChoice, StepEstimate | None]:
    live = large_live_bytes(trace)
    gaps = all_gaps(trace)
    lane = updated(trace, device, gaps)
    if lane is not None:
        gaps = select(gaps, lane.others)
        live = live - _away(trace, lane.gaps) + lane.held
    found = _choices(trace, gaps, live, room)
    choices = (_choice(trace, gaps, index, live, lane) for index in found)
    return _fastest(trace, device, choices if compare else islice(choices, FEW), room)


def _fastest(
    trace: StepTrace, device: DeviceProfile, choices: Iterator[GapChoice], room: int
) -> tuple[GapChoice, StepEstimate | None]:
    """Return the choice with the min estimate; the estimate is None where nothing leaves.

    Among nearly equal ones the choice with the least transfers is taken. On a device that hides
    none, only the time of transfers counts: next to much compute it is small for each choice, but
    all there is to gain.
    """
    compared = []
    for choice in choices:
        if not len(choice.away.tensor):
            return choice, None
        found = estimate(trace, device, choice, room)
        moved_us = _transfers_us(trace, device, choice, found)
        us = found.us if device.hides_transfers else moved_us
        compared.append((moved_us, us, choice, found))
    least = min(us for _, us, _, _ in compared)
    near = [row for row in compared if CLEARLY * row[1] <= least]
    _, _, best, most = min(near, key=lambda row: row[:2])
    return best, most


def _transfers_us(
    trace: StepTrace, device: DeviceProfile, choice: GapChoice, found: StepEstimate
) -> float:
    """Return the time of all transfers, one after the other, in µs.

    Between two writes a tensor is copied to the host once, however often it leaves.
    """
    tensor, quiet = choice.away.tensor, found.quiet
    copied = np.concatenate((quiet.tensor, tensor[(quiet.of_gap < 0) & ~trace.clean[tensor]]))
    back = tensor[choice.returns]
    out_us = float(trace.bytes[copied].sum()) / device.bytes_per_us_out
    return out_us + float(trace.bytes[back].sum()) / device.bytes_per_us_in


def _choice(
    trace: StepTrace, gaps: Gaps, index: Ints, live: Ints, lane: Updated | None = None
) -> GapChoice:
    away = select(gaps, index)
    returns = np.flatnonzero(_returns(trace, away))
    occupancy = live - _away(trace, away)
    if lane is None:
        returns = returns[np.argsort(away.end[returns], kind="stable")]
        return GapChoice(away, returns, occupancy)
    returns = np.concatenate((lane.returns, len(lane.after) + returns))
    after = np.concatenate((lane.after, away.start))
    away = joined(lane.gaps, away)
    returns = returns[np.argsort(away.end[returns], kind="stable")]
    return GapChoice(away, returns, occupancy, after, lane.updates)


def _away(trace: StepTrace, gaps: Gaps) -> Ints:
    return bytes_over(gaps, trace.bytes[gaps.tensor], trace.n_ops)


def _returns(trace: StepTrace, gaps: Gaps) -> Ints:
    """Return whether a use ends the gap."""
    persistent = trace.kind[gaps.tensor] == Kind.PERSISTENT
    unended = np.where(persistent, gaps.start < 0, gaps.end > trace.last[gaps.tensor])
    return ~unended


def _choices(trace: StepTrace, gaps: Gaps, live: Ints, room: int) -> Iterator[Ints]:
    """Yield a choice by idle time, then others if it moves anything and comparing takes no time."""
    excess = live - room
    first = choose(trace, gaps, excess, gaps.idle_us)
    yield first
    if not len(first) or len(gaps.tensor) > COMPARED:
        return
    yield from streamed(trace, gaps, live, room)
    seen = {first.tobytes()}
    for priority in _priorities(trace, gaps, excess):
        index = choose(trace, gaps, excess, priority)
        if index.tobytes() not in seen:
            yield index
        seen.add(index.tobytes())


def _priorities(trace: StepTrace, gaps: Gaps, excess: Ints) -> Iterator[Floats]:
    """Yield priorities that weigh the time of a gap against its transfers.

    A copy to the host can be made from the last write on, so the time since then counts. The copy
    is valid until the next write, so the gaps between two writes share its cost. The first priority
    takes gaps without a return before all others, the last one those of persistent tensors, which
    can leave before the forward pass needs the space.
    """
    n, step_us, returns = trace.n_ops, trace.compute_us, _returns(trace, gaps)
    quiet, copied = quiet_times(trace, gaps), ~trace.clean[gaps.tensor]
    known = quiet.of_gap >= 0
    written = np.where(known, np.append(quiet.written, 0)[quiet.of_gap], gaps.start)
    # Quiet times count from the step of their end, in which the gap may not be.
    written = np.where(known & (written + n <= gaps.start), written + n, written)
    begin = trace.begin_twice_us
    since = begin[gaps.end] - (begin[written + 1 + n] - step_us)
    us = np.where(copied, since, gaps.idle_us + step_us)
    over = np.concatenate(([0], np.cumsum(np.tile(excess > 0, 2))))
    helps = over[gaps.end] > over[gaps.start + 1]
    sharing = np.bincount(quiet.of_gap[known & helps], minlength=len(quiet.tensor) + 1)
    copies = copied / np.maximum(sharing[quiet.of_gap], 1)  # the last is 0, for those of no write
    yield np.where(returns, us, us + 3 * step_us)
    yield us - WEIGHT * step_us * (returns + copies)
    persistent = trace.kind[gaps.tensor] == Kind.PERSISTENT
    yield gaps.idle_us + 2 * step_us * persistent


def _fetches(trace: StepTrace, choice: GapChoice) -> Entries[Fetch]:
    n, counted = trace.n_ops, trace.access_op[trace.large[trace.access_tensor]]
    chosen, after = select(choice.away, choice.returns), choice.begins[choice.returns]
    # Parameters updated by the host after the engine's last op of the step return in the next step.
    late = (after > chosen.start) & (after % n >= int(counted.max(initial=-1)))
    after = np.where(late, after // n * n + n - 1, after)
    later = np.where(after >= n - late, n, 0)
    return Entries(Fetch, after - later, chosen.end - later, chosen.tensor)
