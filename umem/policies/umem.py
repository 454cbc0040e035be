"""`umem`, the default: the longest idle tensors leave early and return by deadline."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..devices import DeviceProfile
from ..trace.step import Floats, Gaps, Ints, Kind, StepTrace
from .base import Copy, Fetch, Move, Plan
from .choice import choose
from .estimate import Choice, estimate
from .occupancy import all_gaps, bytes_over, capacity, large_live_bytes, select
from .streaming import streamed
from .writeback import write_backs

COMPARED = 8192  # up to so many gaps several choices are compared; beyond, one has to do
NEAR = 1.5  # ratio of idle times that are taken for equal
HIDDEN = 1.002  # of the compute time: nothing is left to gain
CLEARLY = 0.995  # of the time so far: less is worth bytes, which others may want to move
GREAT = 0.02  # of the capacity: the choice of sizes matters only for tensors like that


class Umem:
    """Greedy choice of the idle intervals that tensors spend away, longest time first.

    Every gap between two uses of a large tensor is a chance to be away, and so is the rest of its
    life after the last use. In the order of idle time, a gap is left where any op inside is over
    the capacity; then gaps that turn out not to be needed are kept after all, shortest first, which
    brings the bytes moved near to their lower bound. Other orders suit some steps better: the
    choice with the least estimated step time is taken. A chosen tensor leaves as soon as its last
    use has ended, and returns in the order of deadlines once the planned occupancy has room for it
    until its next use. What has been written for the last time before it leaves is written back
    early where the link out is idle.

    Source: the interval view of Belady's rule (Belady 1966; Berger, Beckmann and Harchol-Balter,
    "Practical bounds on optimal caching with variable object sizes", SIGMETRICS 2018), with early
    eviction, gated prefetch and early write-back.
    """

    name = "umem"
    on_trial = True  # its plans are to be better than lru

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:
        """A gated plan; without moves where the step fits."""
        trace = trace.pieces
        room = capacity(trace, budget)
        live = large_live_bytes(trace)
        gaps = all_gaps(trace)
        choices = (_choice(trace, gaps, index, live) for index in _choices(trace, gaps, live, room))
        best, copies = _fastest(trace, device, choices, room)
        away, _, occupancy = best
        left = np.unique(away.tensor)
        return Plan(
            trace,
            evict=tuple(map(Move, away.start.tolist(), away.tensor.tolist())),
            fetch=_fetches(best),
            copy=copies,
            read_mostly=tuple(left[trace.clean[left]].tolist()),
            gated=True,
            occupancy=np.minimum(occupancy, room),
            capacity=room,
            order="furthest",
        )


def _fastest(
    trace: StepTrace, device: DeviceProfile, choices: Iterator[Choice], room: int
) -> tuple[Choice, tuple[Copy, ...]]:
    """The one with the least estimate; the first that hides all transfers will do."""
    least = math.inf
    for choice in choices:
        if not len(choice.away.tensor):
            return choice, ()
        found = estimate(trace, device, choice, room)
        if found.us < CLEARLY * least:
            best, most, least = choice, found, found.us
        if least <= HIDDEN * trace.compute_us:
            break
    return best, write_backs(most.quiet, most.copied, trace.n_ops)


def _choice(trace: StepTrace, gaps: Gaps, index: Ints, live: Ints) -> Choice:
    away = select(gaps, index)
    returns = np.flatnonzero(_returns(trace, away))
    returns = returns[np.argsort(away.end[returns], kind="stable")]
    occupancy = live - bytes_over(away, trace.bytes[away.tensor], trace.n_ops)
    return Choice(away, returns, occupancy)


def _returns(trace: StepTrace, gaps: Gaps) -> Ints:
    """Whether a use ends the gap."""
    persistent = trace.kind[gaps.tensor] == Kind.PERSISTENT
    unended = np.where(persistent, gaps.start < 0, gaps.end > trace.last[gaps.tensor])
    return ~unended


def _choices(trace: StepTrace, gaps: Gaps, live: Ints, room: int) -> Iterator[Ints]:
    """By idle time; then, where that moves anything and there is time to compare, other ways.

    Where weights stream by, what else leaves matters little.
    """
    excess = live - room
    first = choose(trace, gaps, excess, gaps.idle_us)
    yield first
    if not len(first) or len(gaps.tensor) > COMPARED:
        return
    streams = False
    for index in streamed(trace, gaps, live, room):
        streams = True
        yield index
    if streams:
        return
    seen = {first.tobytes()}
    for priority in _priorities(trace, gaps, room):
        index = choose(trace, gaps, excess, priority)
        if index.tobytes() not in seen:
            yield index
        seen.add(index.tobytes())


def _priorities(trace: StepTrace, gaps: Gaps, room: int) -> Iterator[Floats]:
    """Other orders than by idle time.

    What is of no more use first, or last; what persists first, which can have left before forward
    needs the room; or of nearly equal idle times the smaller tensor.
    """
    time = gaps.idle_us
    returns = _returns(trace, gaps)
    if not returns.all():
        yield np.where(returns, time, time + 2 * trace.compute_us)
        yield np.where(returns, time, 0.0)
    persists = trace.kind[gaps.tensor] == Kind.PERSISTENT
    if persists.any():
        yield np.where(persists, time + 2 * trace.compute_us, time)
    size = trace.bytes[gaps.tensor].astype(float)
    if size.max(initial=0.0) > GREAT * room:
        yield np.round(np.log1p(time) / np.log(NEAR)) - size / (size.max() + 1)


def _fetches(choice: Choice) -> tuple[Fetch, ...]:
    chosen = select(choice.away, choice.returns)
    columns = (chosen.start.tolist(), chosen.end.tolist(), chosen.tensor.tolist())
    return tuple(map(Fetch, *columns))
