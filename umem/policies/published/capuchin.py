"""Baseline `capuchin`: swap tensors of the peak by their free time, triggered by accesses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...base.device_profiles import DeviceProfile
from ...trace.step_trace import Bools, Ints, StepTrace
from ..base import Move, Plan
from ..default.occupancy import capacity, large_live_bytes, movable_gaps, select
from .lanes import Link, first_come, latest_starts
from .phases import fetch

EARLIER = 0.05  # of the transfer's time: a late fetch is triggered this much earlier next time
ROUNDS = 40


class Capuchin:
    """Swap by free time: the rest of an idle interval after both transfers, longest first.

    Candidates are idle while the step is above the capacity (the peak window), and are taken until
    no op is. A fetch is triggered by the last access that leaves it enough time, with one lane in
    each direction, but outside the peak window. In the original's feedback, an iteration that finds
    a tensor still in flight at its use moves the trigger 5 % of the transfer earlier; here it runs
    on the planned lanes until no fetch is late.

    This is the swapping half only: tensors that the original would recompute, because the swap is
    exposed (negative free time), are swapped as well.

    Source: Peng et al., "Capuchin: tensor-based GPU memory management for deep learning", ASPLOS
    2020.
    """

    name = "capuchin"

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:
        """Return evictions after the last use, and fetches with their triggers."""
        link = Link.of(device)
        room = capacity(trace, budget)
        excess = large_live_bytes(trace) - room
        swaps = _chosen(_candidates(trace, excess > 0, link), excess)
        triggers = _triggers(trace, swaps, excess > 0)
        fetches = [
            fetch(trace, after, swap.end, swap.tensor)
            for swap, after in zip(swaps, triggers, strict=True)
        ]
        return Plan(
            trace,
            evict=tuple(sorted(Move(swap.start, swap.tensor) for swap in swaps)),
            fetch=tuple(sorted(fetches, key=lambda one: (one.after, one.by, one.tensor))),
        )


class Swap(NamedTuple):
    """A candidate. Times are in µs from the step's start, without any stall."""

    tensor: int
    start: int
    end: int
    bytes: int
    evicted_us: float  # end of the last use before
    back_us: float  # start of the next use
    out_us: float
    in_us: float

    @property
    def free_us(self) -> float:
        """FT of the paper; negative if the swap is exposed."""
        return (self.back_us - self.in_us) - (self.evicted_us + self.out_us)


def _candidates(trace: StepTrace, peak: Bools, link: Link) -> list[Swap]:
    gaps = movable_gaps(trace)
    hot = np.flatnonzero(peak)
    n = trace.n_ops
    inside = np.searchsorted(hot, np.minimum(gaps.end, n)) - np.searchsorted(hot, gaps.start + 1)
    inside += np.searchsorted(hot, gaps.end - n)
    gaps = select(gaps, np.flatnonzero((gaps.start >= 0) & (inside > 0)))
    found = []
    for tensor, start, end, idle in zip(
        gaps.tensor.tolist(), gaps.start.tolist(), gaps.end.tolist(), gaps.idle_us.tolist(),
        strict=True,
    ):  # fmt: skip
        size = int(trace.bytes[tensor])
        evicted = float(trace.begin_us[start + 1])
        times = (evicted, evicted + idle, link.time_out(size), link.time_in(size))
        found.append(Swap(tensor, start, end, size, *times))
    return found


def _chosen(found: list[Swap], excess: Ints) -> list[Swap]:
    """Choose by free time, descending, each if an op inside still exceeds the capacity."""
    over = excess.copy()
    n = len(over)
    taken = []
    for swap in sorted(found, key=lambda one: (-one.free_us, one.tensor, one.start)):
        inside, around = over[swap.start + 1 : min(swap.end, n)], over[: max(0, swap.end - n)]
        if inside.max(initial=0) > 0 or around.max(initial=0) > 0:
            inside -= swap.bytes
            around -= swap.bytes
            taken.append(swap)
    return taken


def _triggers(trace: StepTrace, swaps: list[Swap], peak: Bools) -> list[int]:
    """Return the op after which each fetch starts, counting on past the step's end."""
    order = sorted(range(len(swaps)), key=lambda one: (-swaps[one].back_us, swaps[one].tensor))
    starts = latest_starts((swaps[one].back_us, swaps[one].in_us) for one in order)
    begin = dict(zip(order, starts, strict=True))
    free = np.flatnonzero(~np.tile(peak, 2))  # ops of two steps outside the peak window
    triggers = [0] * len(swaps)
    for _ in range(ROUNDS):
        triggers = [_trigger(trace, swap, begin[one], free) for one, swap in enumerate(swaps)]
        late = _late(trace, swaps, triggers)
        if not late:
            break
        for one in late:
            begin[one] -= EARLIER * swaps[one].in_us
    return triggers


def _trigger(trace: StepTrace, swap: Swap, start_us: float, free: Ints) -> int:
    step, rest = divmod(start_us, trace.compute_us) if trace.compute_us > 0 else (0.0, 0.0)
    ended = int(np.searchsorted(trace.begin_us[1:], rest, side="right")) - 1
    after = max(swap.start, int(step) * trace.n_ops + ended)
    following: list[int] = free[np.searchsorted(free, after) :][:1].tolist()
    return min([*following, swap.end - 1])


def _late(trace: StepTrace, swaps: list[Swap], triggers: list[int]) -> list[int]:
    """Return the fetches still in flight at their use, on a lane that runs them by trigger."""
    n = trace.n_ops
    ready = [
        float(trace.begin_us[after % n + 1]) + after // n * trace.compute_us for after in triggers
    ]
    order = sorted(range(len(swaps)), key=lambda one: (ready[one], swaps[one].back_us))
    ends = first_come((ready[one], swaps[one].in_us) for one in order)
    return [one for one, end in zip(order, ends, strict=True) if end > swaps[one].back_us + 1e-6]
