"""Baseline `stream_layers`: most layers' weights stay, the others rotate through two buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ...base.device_profiles import DeviceProfile
from ...trace.step_trace import Kind, StepTrace
from ..base import Fetch, Move, Plan
from ..default.occupancy import capacity, large_live_bytes
from .phases import fetch

BUFFERS = 2


class StreamLayers:
    """Keep a fixed part of the weights: they are used in a cycle, the worst case of `lru`.

    A layer is a run of weights in the order of use, filled up to the largest weight. The memory
    that the step leaves holds `total` layers; if that is not all n, S = n - (total - 2) of them are
    scheduled, evenly spaced, and pass through two buffers: a layer is loaded when the last but one
    has been used, in the order of the trace, so reversed in backward. With fewer than two layers
    nothing can rotate, and everything is on demand; tensors that the step does not write still
    leave without a transfer.

    Source: Han et al., "BMInf: an efficient toolkit for big model inference and tuning", ACL 2022
    (System Demonstrations), and its scheduler.
    """

    name = "stream_layers"

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:  # noqa: ARG002
        """Return moves of the scheduled layers; the tensors of the others are kept."""
        layers = _layers(trace)
        weights = [tensor for layer in layers for tensor in layer]
        others = large_live_bytes(trace).max(initial=0) - int(trace.bytes[weights].sum())
        size = max((int(trace.bytes[layer].sum()) for layer in layers), default=1)
        total = max(0, capacity(trace, budget) - int(others)) // size
        if total >= len(layers):
            return Plan(trace, retain=tuple(weights))
        if total < BUFFERS:
            return Plan(trace, read_mostly=_clean(trace, weights))
        moving = scheduled(len(layers), total)
        evict, fetches = _rotate(trace, [layers[index] for index in moving])
        rotating = {tensor for index in moving for tensor in layers[index]}
        return Plan(
            trace,
            evict=tuple(evict),
            fetch=tuple(fetches),
            retain=tuple(tensor for tensor in weights if tensor not in rotating),
            read_mostly=_clean(trace, rotating),
        )


def scheduled(n: int, total: int) -> list[int]:
    """Return which of `n` layers move when `total` fit, two as buffers: evenly spaced ones."""
    moving = n - (total - BUFFERS)
    return [i for i in range(n) if (i + 1) * moving // n > i * moving // n]


class _Visit(NamedTuple):
    """A run of ops that use one scheduled layer and no other."""

    layer: int
    begin: int
    end: int


def _clean(trace: StepTrace, tensors: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(tensor for tensor in tensors if trace.clean[tensor]))


def _layers(trace: StepTrace) -> list[list[int]]:
    """Return large weights in the order of first use, in runs of up to the largest one's bytes.

    The parameters that `Module.to` makes have no tag, so tensors that are only read count.
    """
    used = np.diff(trace.use_start) > 0
    candidates = np.flatnonzero(trace.large & used & (trace.kind == Kind.PERSISTENT)).tolist()
    weights = [t for t in candidates if trace.clean[t] or trace.tags[t] == "param"]
    weights.sort(key=lambda tensor: (int(trace.uses(tensor)[0]), tensor))
    limit = max((int(trace.bytes[tensor]) for tensor in weights), default=0)
    layers: list[list[int]] = []
    filled = limit
    for tensor in weights:
        size = int(trace.bytes[tensor])
        if filled + size > limit:
            layers.append([])
            filled = 0
        layers[-1].append(tensor)
        filled += size
    return layers


def _rotate(trace: StepTrace, layers: list[list[int]]) -> tuple[list[Move], list[Fetch]]:
    """Load the k-th visit of the step after visit k - 2, whose layer leaves then.

    A layer that is already in a buffer, as at the turn from forward to backward, stays there.
    """
    visits = _visits(trace, layers)
    n = trace.n_ops
    evict: list[Move] = []
    fetches: list[Fetch] = []
    held: list[_Visit] = []  # the last visit of each layer in a buffer, the oldest first
    for lap in range(2):  # the first lap finds the contents of the buffers at the step's start
        for visit in visits:
            now = visit._replace(begin=visit.begin + lap * n, end=visit.end + lap * n)
            same = [old for old in held if old.layer == now.layer]
            held = [old for old in held if old.layer != now.layer]
            if not same and len(held) == BUFFERS:
                gone = held.pop(0)
                if lap:
                    evict += [
                        Move(ops[-1] % n, tensor)
                        for tensor in layers[gone.layer]
                        if (ops := _ops_in(trace, tensor, gone))
                    ]
                    fetches += [
                        fetch(trace, gone.end, ops[0], tensor)
                        for tensor in layers[now.layer]
                        if (ops := _ops_in(trace, tensor, now)) and ops[0] > gone.end
                    ]
            held.append(now)
    return sorted(evict), sorted(fetches, key=lambda one: one.by)


def _ops_in(trace: StepTrace, tensor: int, visit: _Visit) -> list[int]:
    """Return the ops of the visit that use the tensor: not all use all of a layer."""
    lap = visit.begin // trace.n_ops * trace.n_ops
    return [op + lap for op in trace.uses(tensor).tolist() if visit.begin <= op + lap <= visit.end]


def _visits(trace: StepTrace, layers: list[list[int]]) -> list[_Visit]:
    uses = sorted(
        (op, index)
        for index, layer in enumerate(layers)
        for tensor in layer
        for op in trace.uses(tensor).tolist()
    )
    visits: list[_Visit] = []
    for op, index in uses:
        if visits and visits[-1].layer == index:
            visits[-1] = visits[-1]._replace(end=op)
        else:
            visits.append(_Visit(index, op, op))
    return visits
