"""Reference models of demand paging, for tests: exact, slow, and of whole objects only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from umem.trace.step_trace import Kind, StepTrace

Op = Sequence[int]
Rank = Callable[[int], float]  # the object with the greatest leaves first


class Moved(NamedTuple):
    """Bytes in by reloads, and bytes out by write-backs."""

    bytes_in: float
    bytes_out: float


def reloads(ops: Sequence[Op], sizes: Sequence[int], capacity: int, policy: str) -> int:
    """Bytes reloaded by `lru` or `belady` (furthest next use) over a program that runs once.

    The first touch is free, an object without a later use is dropped immediately, the objects of
    the running op are kept, and among equals the one resident for the longest leaves.
    """
    last = {t: i for i, objects in enumerate(ops) for t in objects}
    resident: dict[int, int] = {}  # in order of arrival -> last use
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


def steady(trace: StepTrace, capacity: int, policy: str | int) -> Moved:
    """Bytes in and out per step under a demand policy, once the steps repeat.

    The policy is `lru`, `belady`, or a number: any order of eviction, one for each number.

    An op's inputs are fetched before it; a tensor is dirty if written since its last write-back. It
    is kept until the program frees it, even if it is not read again. The mean is over the steps
    from one state to the same state again.
    """
    n = trace.n_ops
    state = _State(trace, capacity, policy)
    seen: dict[object, tuple[int, Moved]] = {}
    for step in range(200):
        key = state.key()
        if key in seen:
            since, before = seen[key]
            length = step - since
            bytes_in = (state.bytes_in - before.bytes_in) / length
            return Moved(bytes_in, (state.bytes_out - before.bytes_out) / length)
        seen[key] = (step, Moved(state.bytes_in, state.bytes_out))
        for op in range(n):
            state.run(op)
        state.end_step()
    raise AssertionError("the steps do not repeat")


class _State:
    """The device's contents between two ops."""

    def __init__(self, trace: StepTrace, capacity: int, policy: str | int) -> None:
        self._trace, self._capacity, self._policy = trace, capacity, policy
        self._uses = [trace.uses(t).tolist() for t in range(trace.n_tensors)]
        read = (
            np.ones(len(trace.access_op), bool) if trace.access_read is None else trace.access_read
        )
        reads = zip(trace.access_tensor.tolist(), trace.access_op.tolist(), read, strict=True)
        self._over = {(t, op) for t, op, reads_it in reads if not reads_it}
        self._size = trace.bytes.tolist()
        self._last: dict[int, int] = {}  # resident -> op of its last use, negative: steps ago
        self._dirty: set[int] = set()
        self._started: set[int] = set()
        self.bytes_in = self.bytes_out = 0

    def key(self) -> object:
        """Equal where all that follows is equal."""
        return tuple(self._last.items()), frozenset(self._dirty), frozenset(self._started)

    def run(self, op: int) -> None:
        """One op: its tensors in, others out, what is not used again dropped."""
        span = slice(*self._trace.access_start[op : op + 2])
        tensors = self._trace.access_tensor[span].tolist()
        for t in tensors:
            if t not in self._last and t in self._started and (t, op) not in self._over:
                self.bytes_in += self._size[t]
            self._last[t] = op
        while sum(self._size[t] for t in self._last) > self._capacity:
            self._evict(op, [t for t in self._last if t not in tensors])
        self._started.update(tensors)
        self._dirty.update(compress(tensors, self._trace.access_write[span]))
        for t in [t for t in self._last if self._freed(t) <= op]:
            del self._last[t]
            self._dirty.discard(t)

    def end_step(self) -> None:
        """Non-persistent tensors start over."""
        kept = {t for t in self._started if self._trace.kind[t] == Kind.PERSISTENT}
        self._started = kept
        self._last = {t: op - self._trace.n_ops for t, op in self._last.items()}

    def _evict(self, op: int, tensors: list[int]) -> None:
        victim = max(tensors, key=lambda t: self._rank(t, op))
        del self._last[victim]
        if victim in self._dirty:
            self._dirty.discard(victim)
            self.bytes_out += self._size[victim]

    def _rank(self, t: int, op: int) -> float:
        if self._policy == "lru":
            return -self._last[t]
        if self._policy == "belady":
            return self._next(t, op)
        return hash((self._policy, t, op))  # a hash of integers: the same in every process

    def _freed(self, t: int) -> float:
        persistent = self._trace.kind[t] == Kind.PERSISTENT
        return math.inf if persistent else float(self._trace.last[t])

    def _next(self, t: int, op: int) -> float:
        later = [use for use in self._uses[t] if use > op]
        persistent = self._trace.kind[t] == Kind.PERSISTENT
        if not later and not persistent:
            return math.inf
        use = later[0] if later else self._uses[t][0]
        if (t, use) in self._over:
            return math.inf
        return use if later else use + self._trace.n_ops
