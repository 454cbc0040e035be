"""Baseline `distance`: swap a tensor if its next consumer is many levels of the graph away."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...base.device_profiles import DeviceProfile
from ...trace.step_trace import Kind, StepTrace
from ..base import Move, Plan
from ..default.occupancy import capacity, large_live_bytes
from .graph import DataflowGraph
from .phases import fetch

MEMORY_RATIO = 0.9  # of the bytes that variables leave free: TF_LMS_SIMULATOR_MEM_RATIO
SYNC_OUT, SYNC_IN = 1, 2


@dataclass(frozen=True)
class Levels:
    """The parameters of TensorFlow LMS v2, in levels."""

    threshold: int = 1  # a tensor is swapped out before consumers further away than this
    ahead: int = 1  # levels between its fetch and its consumer
    groupby: int = 0  # consumers within this distance share one fetch
    sync: int = 0  # 1: compute waits for evictions, 2: for fetches, 3: for both


class Distance:
    """Swap out after the producer or its last near consumer; swap in ahead of each far group.

    Without `levels` they are tuned as in the original, on a model that replays liveness: wait more
    until it fits, then the largest threshold that still fits, then the largest `ahead`, then the
    largest `groupby`. The model gives tensors 0.9 of the memory that weights and states leave free.

    Source: Le et al., "Automatic GPU memory management for large neural models in TensorFlow", ISMM
    2019, and IBM's tensorflow-large-model-support, branch tflmsv2.
    """

    name = "distance"

    def __init__(self, levels: Levels | None = None) -> None:
        self.levels = levels

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:  # noqa: ARG002
        """Return moves, and waits if `sync` asks for them."""
        model = _Model(trace, capacity(trace, budget))
        levels = self.levels if self.levels is not None else model.tune()
        if levels is None:
            return Plan(trace)
        swaps = model.swaps(levels)
        waits: set[int] = set()
        if levels.sync & SYNC_OUT:
            waits |= {swap.start for swap in swaps}
        if levels.sync & SYNC_IN:
            waits |= {swap.end - 1 for swap in swaps}
        fetches = [fetch(trace, swap.after, swap.end, swap.tensor) for swap in swaps]
        return Plan(
            trace,
            evict=tuple(sorted(Move(swap.start, swap.tensor) for swap in swaps)),
            fetch=tuple(sorted(fetches, key=lambda one: (one.after, one.by, one.tensor))),
            barriers=tuple(sorted(waits)),
        )


class DistanceSwap(NamedTuple):
    """A swap: out after op `start`, in from the end of op `after`, for op `end`."""

    tensor: int
    start: int
    after: int
    end: int


class _Model:
    """The model of the swaps that parameters give, and whether they fit."""

    def __init__(self, trace: StepTrace, room: int) -> None:
        self._trace = trace
        self._graph = DataflowGraph(trace)
        self._live = large_live_bytes(trace)
        persistent = trace.large & (trace.kind == Kind.PERSISTENT)
        variables = int(trace.bytes[persistent].sum())
        self._limit = variables + MEMORY_RATIO * max(0, room - variables)
        used = np.diff(trace.use_start) > 0
        produced = np.flatnonzero(trace.large & used & (trace.kind == Kind.TRANSIENT)).tolist()
        self._uses = {tensor: trace.uses(tensor).tolist() for tensor in produced}

    def tune(self) -> Levels | None:
        """Return tuned parameters; None if all fits. If nothing fits, those that swap most."""
        if self._live.max(initial=0) <= self._limit:
            return None
        deepest = max(1, max(self._graph.level, default=1))
        tried = [Levels(sync=sync) for sync in range(4)]
        levels = next((one for one in tried if self._fits(one)), None)
        if levels is None:
            return tried[-1]
        for name, least in (("threshold", 1), ("ahead", 1), ("groupby", 0)):
            levels = self._largest(levels, name, least, deepest)
        return levels

    def _largest(self, levels: Levels, name: str, least: int, most: int) -> Levels:
        """Search binarily, assuming that a smaller value fits if a larger one does."""
        if self._fits(replace(levels, **{name: most})):
            return replace(levels, **{name: most})
        while most - least > 1:
            middle = (least + most) // 2
            if self._fits(replace(levels, **{name: middle})):
                least = middle
            else:
                most = middle
        return replace(levels, **{name: least})

    def _fits(self, levels: Levels) -> bool:
        left = np.concatenate((self._live, [0]))
        change = np.zeros_like(left)
        for swap in self.swaps(levels):
            gone = swap.start + 1 if levels.sync & SYNC_OUT else self._graph.next_level(swap.start)
            back = swap.end if levels.sync & SYNC_IN else swap.after + 1
            if gone < back:
                change[gone] -= self._trace.bytes[swap.tensor]
                change[back] += self._trace.bytes[swap.tensor]
        return bool((left + np.cumsum(change)).max(initial=0) <= self._limit)

    def swaps(self, levels: Levels) -> list[DistanceSwap]:
        """Return the swaps in the order of their consumers."""
        found: list[DistanceSwap] = []
        for tensor, uses in self._uses.items():
            found += self._of_tensor(tensor, uses, levels)
        found.sort(key=lambda swap: (swap.end, swap.tensor))
        return found

    def _of_tensor(self, tensor: int, uses: list[int], levels: Levels) -> list[DistanceSwap]:
        level = self._graph.level
        near = [op for op in uses if level[op] - level[uses[0]] <= levels.threshold]
        last = near[-1]
        swaps = []
        for op in (op for op in uses if op > last):
            if op - last > 1 and (last == near[-1] or level[op] - level[last] > levels.groupby):
                after = self._graph.trigger(op, last, levels.ahead)
                swaps.append(DistanceSwap(tensor, last, after, op))
            last = op
        return swaps
