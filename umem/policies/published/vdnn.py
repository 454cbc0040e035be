"""Baselines `vdnn_all`, `vdnn_conv` and `vdnn`: offload layer inputs during forward."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np

from ...base.device_profiles import DeviceProfile
from ...trace.step_trace import Gaps, StepTrace
from ..base import Fetch, Move, Plan
from ..default.occupancy import bytes_over, capacity, large_live_bytes, select
from .phases import saved_for_backward

Layers = Literal["none", "conv", "all"]


class Vdnn:
    """The static offload of `vdnn_all` and `vdnn_conv`, or the first of none, conv, all to fit.

    A layer's input leaves after its last use in forward, and compute waits for it one op later; in
    backward the start of one layer fetches the input of the next, and its end waits for that. The
    search for the next layer stops at a convolution whose input was not offloaded, so that nothing
    is fetched too early. A layer is an op here. The paper's ladder continues with convolution
    algorithms that need less workspace; those are the framework's choice.

    Source: Rhu et al., "vDNN: virtualized deep neural networks for scalable, memory-efficient
    neural network design", MICRO 2016.
    """

    name = "vdnn"
    layers: Layers | None = None  # None: the dynamic ladder

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:  # noqa: ARG002
        """Return moves and waits; none if the step fits and the ladder may choose."""
        saved = saved_for_backward(trace)
        chosen = _of_layers(trace, saved, self.layers or _first_that_fits(trace, saved, budget))
        fetches = _prefetches(trace, chosen)
        last = trace.n_ops - 1
        offloaded = {min(start + 1, last) for start in chosen.start.tolist()}
        fetched = {one.after + 1 for one in fetches}
        return Plan(
            trace,
            evict=tuple(map(Move, chosen.start.tolist(), chosen.tensor.tolist())),
            fetch=fetches,
            barriers=tuple(sorted(offloaded | fetched)),
        )


class VdnnAll(Vdnn):
    """Offload of the inputs of all layers."""

    name = "vdnn_all"
    layers: Layers | None = "all"


class VdnnConv(Vdnn):
    """Offload of the inputs of convolutions only."""

    name = "vdnn_conv"
    layers: Layers | None = "conv"


def _of_layers(trace: StepTrace, saved: Gaps, layers: Layers) -> Gaps:
    if layers == "all":
        return saved
    conv = [
        gap
        for gap, (tensor, start) in enumerate(
            zip(saved.tensor.tolist(), saved.start.tolist(), strict=True)
        )
        if layers == "conv" and _feeds_convolution(trace, tensor, start)
    ]
    return select(saved, np.array(conv, np.int64))


def _feeds_convolution(trace: StepTrace, tensor: int, until: int) -> bool:
    uses = trace.uses(tensor).tolist()
    made = uses[0] if trace.first[tensor] >= 0 else -1
    return any(_is_convolution(trace, op) for op in uses if made < op <= until)


def _is_convolution(trace: StepTrace, op: int) -> bool:
    return "conv" in trace.op_names[op].lower()


def _first_that_fits(trace: StepTrace, saved: Gaps, budget: int) -> Layers:
    room = capacity(trace, budget)
    live = large_live_bytes(trace)
    ladder: tuple[Layers, ...] = ("none", "conv")
    for layers in ladder:
        away = _of_layers(trace, saved, layers)
        over = live - bytes_over(away, trace.bytes[away.tensor], trace.n_ops)
        if over.max(initial=0) <= room:
            return layers
    return "all"


def _prefetches(trace: StepTrace, chosen: Gaps) -> tuple[Fetch, ...]:
    """Fetch at the first op of a layer of backward, for the next layer that was offloaded."""
    order = np.lexsort((chosen.tensor, chosen.end))
    needed: dict[int, list[int]] = {}  # an op of backward: the tensors that it gets back
    for tensor, end in zip(chosen.tensor[order].tolist(), chosen.end[order].tolist(), strict=True):
        needed.setdefault(end, []).append(tensor)
    found: list[Fetch] = []
    ops = list(needed)
    for current, following in pairwise(ops):
        between = range(current + 1, following)
        if not any(_is_convolution(trace, op) for op in between):
            found += [Fetch(current - 1, following, tensor) for tensor in needed[following]]
    return tuple(found)
