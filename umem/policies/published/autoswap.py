"""Baseline `autoswap`: swap candidates that span the peak, ranked by the value of their absence."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np

from ...base.device_profiles import DeviceProfile
from ...errors import ConfigError
from ...trace.step_trace import Floats, Ints, StepTrace
from ..base import Move, Plan
from ..default.occupancy import capacity, large_live_bytes, movable_gaps, select
from .lanes import Link, first_come, latest_starts
from .phases import fetch

Score = Literal["doa", "aoa", "wdoa", "swdoa", "vote"]
Schedule = Literal["no_overhead", "stick_to_limit"]


class SwapCandidate(NamedTuple):
    """An idle interval that spans the peak: ops [r, d); a negative r is in the step before."""

    tensor: int
    r: int
    d: int
    bytes: int
    doa: float  # duration of absence in µs: the rest of the interval after both transfers

    @property
    def aoa(self) -> float:
        """The area of absence; for too short an interval the negative duration per byte."""
        return self.doa * self.bytes if self.doa >= 0 else self.doa / self.bytes


class AutoSwap:
    """Take candidates by score until the load at the peak is below the limit.

    Scores: DOA, AOA, WDOA (the load above the limit over the interval), SWDOA (WDOA on the load
    that is left after each pick), or a Borda vote of the first three. Transfers are laid out on
    one lane in each direction: outs in the order of r, as early as possible; ins in the order of d,
    the last first, as late as possible. `stick_to_limit` then makes compute wait where the load
    would exceed the limit before an out has ended, and starts an in only where there is space;
    `no_overhead` accepts that the load may exceed the limit.

    Source: Zhang et al., "Efficient memory management for GPU-based deep learning systems", 2019
    (arXiv:1903.06631), and its code in Apache SINGA; docs/policies.md lists the differences between
    the paper and that code.
    """

    name = "autoswap"

    def __init__(
        self,
        score: Score = "vote",
        schedule: Schedule = "stick_to_limit",
        link: Link | None = None,
    ) -> None:
        for given, allowed in ((score, get_args(Score)), (schedule, get_args(Schedule))):
            if given not in allowed:
                raise ConfigError(
                    f"autoswap: {given!r} is not an option; allowed: {', '.join(allowed)}"
                )
        self.score = score
        self.schedule = schedule
        self.link = link  # None: the device's link

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:
        """Return evictions and fetches of the chosen candidates, and where compute waits."""
        link = self.link or Link.of(device)
        limit = capacity(trace, budget)
        load = large_live_bytes(trace)
        found = candidates(trace, load, link)
        picked = self._pick(trace, found, load, limit, link)
        laid = _lay_out(trace, picked, link)
        if self.schedule == "no_overhead":
            return _as_plan(trace, laid, set())
        return _as_plan(trace, *_stick(laid, load, limit))

    def _pick(
        self, trace: StepTrace, found: list[SwapCandidate], load: Ints, limit: int, link: Link
    ) -> list[SwapCandidate]:
        left = load.copy()
        rest = ranked(found, self.score, left, limit)
        picked: list[SwapCandidate] = []
        while rest and left.max(initial=0) > limit:
            best = rest.pop(0)
            picked.append(best)
            if self.schedule == "no_overhead":
                _relieve(trace, left, best, link)
            else:  # compute waits for the transfers, so it is absent for the whole interval
                left[np.arange(best.r + 1, best.d) % trace.n_ops] -= best.bytes
            if self.score == "swdoa":
                rest = ranked(rest, "swdoa", left, limit)
        return picked


def candidates(trace: StepTrace, load: Ints, link: Link) -> list[SwapCandidate]:
    """Return the gaps that span the op of the peak, including the one that wraps around."""
    gaps = movable_gaps(trace)
    gaps = select(gaps, np.flatnonzero(gaps.start >= 0))
    n, peak = trace.n_ops, int(load.argmax()) if trace.n_ops else 0
    found = []
    for tensor, start, end, idle in zip(
        gaps.tensor.tolist(), gaps.start.tolist(), gaps.end.tolist(), gaps.idle_us.tolist(),
        strict=True,
    ):  # fmt: skip
        shift = n if peak < end - n else 0
        if start - shift < peak < end - shift:
            size = int(trace.bytes[tensor])
            doa = idle - link.time_out(size) - link.time_in(size)
            found.append(SwapCandidate(tensor, start - shift, end - shift, size, doa))
    return found


def wdoa(candidate: SwapCandidate, load: Ints, limit: int) -> float:
    """Sum the load above the limit over the ops [r, d), around the step's end."""
    n = len(load)
    over = load - limit
    begin, end = candidate.r, candidate.d
    total = int(over[max(begin, 0) : min(end, n)].sum())
    if begin < 0:
        total += int(over[begin + n :].sum())
    return float(total + (int(over[: end - n].sum()) if end > n else 0))


def ranked(found: list[SwapCandidate], score: Score, load: Ints, limit: int) -> list[SwapCandidate]:
    """Sort by score, best first; ties keep the order of the tensors."""
    by: dict[str, list[float]] = {
        "doa": [one.doa for one in found],
        "aoa": [one.aoa for one in found],
        "wdoa": [wdoa(one, load, limit) for one in found],
    }
    if score == "vote":
        points = sum((_borda(scores) for scores in by.values()), np.zeros(len(found)))
    else:
        points = np.array(by["wdoa" if score == "swdoa" else score])
    return [found[index] for index in np.argsort(-points, kind="stable").tolist()]


def _borda(scores: list[float]) -> Floats:
    """Return for each candidate the number of others that it beats."""
    ordered = np.sort(scores)
    return np.searchsorted(ordered, scores).astype(float)


def _relieve(trace: StepTrace, load: Ints, one: SwapCandidate, link: Link) -> None:
    """Take the candidate off the load between the end of its out and the start of its in."""
    n = trace.n_ops
    out_end = _end_us(trace, one.r) + link.time_out(one.bytes)
    in_start = _begin_us(trace, one.d) - link.time_in(one.bytes)
    ops = np.arange(one.r + 1, one.d)
    begin = trace.begin_us[ops % n] + (ops // n) * trace.compute_us
    away = ops[(begin >= out_end) & (begin + trace.op_us[ops % n] <= in_start)]
    load[away % n] -= one.bytes


class _Away(NamedTuple):
    """Absence of a pick: gone from op `gone` until op `back` has ended, due at `d`."""

    pick: SwapCandidate
    gone: int
    back: int


def _lay_out(trace: StepTrace, picked: list[SwapCandidate], link: Link) -> list[_Away]:
    """Place outs as early and ins as late as one lane each way allows, in the order of r."""
    n = trace.n_ops
    picked = [one._replace(r=one.r % n, d=one.r % n + one.d - one.r) for one in picked]
    outs = sorted(picked, key=lambda one: (one.r, one.tensor))
    ins = sorted(picked, key=lambda one: (one.d, one.tensor), reverse=True)
    ends = first_come((_end_us(trace, one.r), link.time_out(one.bytes)) for one in outs)
    starts = latest_starts((_begin_us(trace, one.d), link.time_in(one.bytes)) for one in ins)
    start_of = dict(zip(ins, starts, strict=True))
    laid = []
    for one, end in zip(outs, ends, strict=True):
        gone = min(_op_at(trace, end) + 1, one.d)
        back = min(max(one.r, _op_at(trace, start_of[one]) - 1), one.d - 1)
        laid.append(_Away(one, gone, back))
    return laid


def _as_plan(trace: StepTrace, laid: list[_Away], waits: set[int]) -> Plan:
    fetches = [fetch(trace, one.back, one.pick.d, one.pick.tensor) for one in laid]
    return Plan(
        trace,
        evict=tuple(Move(one.pick.r, one.pick.tensor) for one in laid),
        fetch=tuple(sorted(fetches, key=lambda one: (one.after, one.by, one.tensor))),
        barriers=tuple(sorted(waits)),
    )


def _stick(laid: list[_Away], load: Ints, limit: int) -> tuple[list[_Away], set[int]]:
    """Let compute wait for outs before the load exceeds the limit; start ins where it fits."""
    n = len(load)
    left = load.copy()
    for one in laid:
        np.subtract.at(left, np.arange(one.gone, one.back + 1) % n, one.pick.bytes)
    waits = set[int]()
    kept = []
    for one in laid:
        ops = np.arange(one.pick.r + 1, max(one.gone, one.pick.r + 1))
        over = ops[left[ops % n] > limit]
        if len(over):
            waits.add(int(over[0] - 1) % n)
            left[ops[ops >= over[0]] % n] -= one.pick.bytes
        ops = np.arange(one.back + 1, one.pick.d)
        over = ops[left[ops % n] > limit]
        if len(over):
            left[ops[ops <= over[-1]] % n] -= one.pick.bytes
            one = one._replace(back=int(over[-1]))
        kept.append(one)
    return kept, waits


def _begin_us(trace: StepTrace, op: int) -> float:
    step, op = divmod(op, trace.n_ops)
    return float(trace.begin_us[op]) + step * trace.compute_us


def _end_us(trace: StepTrace, op: int) -> float:
    step, op = divmod(op, trace.n_ops)
    return float(trace.begin_us[op + 1]) + step * trace.compute_us


def _op_at(trace: StepTrace, us: float) -> int:
    """Return the op that runs at this time, counting on past the step's end."""
    step, rest = divmod(us, trace.compute_us) if trace.compute_us > 0 else (0.0, us)
    op = int(np.searchsorted(trace.begin_us, rest, side="right")) - 1
    return int(step) * trace.n_ops + min(max(op, 0), trace.n_ops - 1)
