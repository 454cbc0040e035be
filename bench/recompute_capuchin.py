"""Capuchin's choice between swapping and recomputing each tensor, for comparison."""

from __future__ import annotations

import numpy as np

from umem.base.device_profiles import DeviceProfile
from umem.policies.default.occupancy import capacity, large_live_bytes
from umem.recompute.planner.candidates import Selection
from umem.recompute.planner.graph import RecomputeGraph
from umem.recompute.planner.rewrite import Rewritten, rewrite
from umem.recompute.planner.score import derated
from umem.recompute.planner.search import LINK
from umem.trace.step_trace import Bools, Ints


def planned(graph: RecomputeGraph, device: DeviceProfile, budget: int) -> Rewritten:
    """Return the step with Capuchin's choice, for the same link as umem's own."""
    room = capacity(graph.step.pieces, budget)
    return rewrite(graph, *choice(graph, derated(device, LINK), room))


def choice(graph: RecomputeGraph, device: DeviceProfile, room: int) -> Selection:
    """Swap tensors whose transfers overlap compute; drop those of the rest that save most per
    second.

    The free time of a tensor is its idle time less both transfers. In descending order of free
    time, tensors are swapped while it is at least 0 and the link has time for it before the peak.
    Among the others, the one with the most bytes per second of recomputation (MSPS) is dropped,
    unless its swap is exposed for less time than its recomputation takes, until no op is over
    `room` bytes. The costs of tensors made from a dropped one rise by its cost.

    Source: Peng et al., "Capuchin: tensor-based GPU memory management for deep learning", ASPLOS
    2020.
    """
    step = graph.step
    excess = large_live_bytes(step) - room
    tensors = np.flatnonzero(graph.droppable)
    begin, end = graph.last_forward[tensors] + 1, graph.first_wanted()[tensors]
    out_us = step.bytes[tensors] / device.bytes_per_us_out
    in_us = step.bytes[tensors] / device.bytes_per_us_in
    free = step.begin_us[end] - step.begin_us[begin] - out_us - in_us
    lane_us = float(step.begin_us[int(np.argmax(excess))]) if len(excess) else 0.0
    exposed: dict[int, float] = {}
    for i in np.argsort(-free, kind="stable").tolist():
        inside = excess[begin[i] : end[i]]
        if inside.max(initial=0) <= 0:
            continue
        if free[i] < 0 or out_us[i] > lane_us:
            exposed[i] = max(-float(free[i]), float(out_us[i]) - lane_us)
            continue
        lane_us -= float(out_us[i])
        inside -= step.bytes[tensors[i]]
    return _made_again(graph, tensors, excess, (begin, end), exposed)


def _made_again(
    graph: RecomputeGraph,
    tensors: Ints,
    excess: Ints,
    idle: tuple[Ints, Ints],
    exposed_us: dict[int, float],
) -> Selection:
    """Drop candidates, the keys of `exposed_us`, greedily by MSPS until no op is over."""
    step, (begin, end) = graph.step, idle
    drop: Bools = np.zeros(step.n_tensors, bool)
    nothing: Bools = np.zeros(step.n_tensors, bool)
    cost = {i: graph.own_us(int(tensors[i]), nothing) for i in exposed_us}
    sources = {i: graph.sources(int(tensors[i])) for i in exposed_us}
    while cost and excess.max(initial=0) > 0:
        best = max(cost, key=lambda i: (step.bytes[tensors[i]] / max(cost[i], 1e-9), -i))
        tensor, us = int(tensors[best]), cost.pop(best)
        inside = excess[begin[best] : end[best]]
        if inside.max(initial=0) <= 0:
            continue
        inside -= step.bytes[tensor]
        if exposed_us[best] < us:
            continue  # it swaps
        drop[tensor] = True
        for other in cost:
            if tensor in sources[other]:
                cost[other] += us
    return Selection(drop, nothing, nothing)
