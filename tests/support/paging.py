"""Reference models of demand paging, for tests: exact, slow, and of whole objects only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from umem.trace.step import Kind, StepTrace

Op = Sequence[int]
Rank = Callable[[int], float]  # the object with the greatest leaves first


class Moved(NamedTuple):
    """Bytes in by reloads, and bytes out by write-backs."""

    bytes_in: int
    bytes_out: int


def reloads(ops: Sequence[Op], sizes: Sequence[int], capacity: int, policy: str) -> int:
    """Bytes reloaded by `lru` or `belady` (furthest next use) over a program that runs once.

    The first touch is free, an object without a later use is dropped at once, the objects of the
    running op stay, and among equals the one that came into the resident set first leaves.
    """
    last = {t: i for i, objects in enumerate(ops) for t in objects}
    resident: dict[int, int] = {}  # in the order they came in -> last use
    seen: set[int] = set()
    total = 0
    for i, objects in enumerate(ops):
        for t in objects:
            if t in resident:
                resident[t] = i
                continue
            rank = _rank(policy, ops, i, resident)
            while sum(sizes[r] for r in resident) + sizes[t] > capacity:
                others = [r for r in resident if r not in objects]
                del resident[max(others, key=rank)]
            total += sizes[t] if t in seen else 0
            seen.add(t)
            resident[t] = i
        for t in [t for t in resident if last[t] <= i]:
            del resident[t]
    return total


def _rank(policy: str, ops: Sequence[Op], now: int, used: dict[int, int]) -> Rank:
    if policy == "lru":
        return lambda t: -used[t]

    def next_use(t: int) -> float:
        return next((j for j in range(now + 1, len(ops)) if t in ops[j]), math.inf)

    return next_use


def steady(trace: StepTrace, capacity: int, policy: str, steps: int = 6) -> Moved:
    """Bytes in and out of the last of `steps` steps in a row, by `lru` or `belady`.

    What an op accesses comes in before it, in part of none; dirty is what was written since its
    last write-back. A MADE tensor ends with the step and a CARRIED one comes from the host.
    """
    n = trace.n_ops
    uses = [trace.uses(t).tolist() for t in range(trace.n_tensors)]
    resident: dict[int, int] = {}
    dirty: set[int] = set()
    ahead: dict[int, Callable[[int], float]] = {}
    for t, ops in enumerate(uses):
        around = trace.kind[t] == Kind.PERSISTENT
        ahead[t] = lambda now, ops=ops, around=around: _after(ops, now, n, around)
    moved = Moved(0, 0)
    started: set[int] = set()
    for step in range(steps):
        bytes_in = bytes_out = 0
        started = {t for t in started if trace.kind[t] == Kind.PERSISTENT}
        for i in range(n):
            span = slice(trace.access_start[i], trace.access_start[i + 1])
            objects = trace.access_tensor[span].tolist()
            for t in objects:
                if t not in resident:
                    bytes_in += int(trace.bytes[t]) if t in started else 0
                resident[t] = step * n + i
            while sum(int(trace.bytes[r]) for r in resident) > capacity:
                others = [r for r in resident if r not in objects]
                ranks = {r: -resident[r] if policy == "lru" else ahead[r](i) for r in others}
                victim = max(ranks, key=ranks.__getitem__)
                del resident[victim]
                if victim in dirty:
                    bytes_out += int(trace.bytes[victim])
                    dirty.discard(victim)
            started.update(objects)
            dirty.update(t for t, w in zip(objects, trace.access_write[span], strict=True) if w)
            for t in [t for t in resident if ahead[t](i) == math.inf]:
                del resident[t]
                dirty.discard(t)
        moved = Moved(bytes_in, bytes_out)
    return moved


def _after(ops: list[int], now: int, n: int, around: bool) -> float:
    later = [op for op in ops if op > now]
    if later:
        return later[0]
    return ops[0] + n if around and ops else math.inf
