"""Baseline `optimizer_state`: optimizer states are on the device only while the optimizer runs."""

from __future__ import annotations

import numpy as np

from ...base.device_profiles import DeviceProfile
from ...trace.step_trace import Kind, StepTrace
from ..base import Move, Plan
from .phases import fetch, phases


class OptimizerState:
    """States are fetched when the optimizer starts, as far as they fit, and evicted after it.

    They are fetched in the order of their use, which is that of the parameters. Parameters and
    gradients stay. The original updates single-precision copies on the CPU; here the GPU does.

    Source: Ren et al., "ZeRO-Offload: democratizing billion-scale model training", ATC 2021.
    """

    name = "optimizer_state"

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:  # noqa: ARG002
        """Return moves of tensors tagged `optimizer`; tensors tagged `param` are kept."""
        begin = phases(trace).optimizer
        evict: list[Move] = []
        fetches = []
        for tensor in _large(trace, "optimizer"):
            uses = trace.uses(tensor)
            if not len(uses):
                evict.append(Move(-1, tensor))
                continue
            evict.append(Move(int(uses[-1]), tensor))
            first = int(uses[0])
            fetches.append(fetch(trace, min(begin, first) - 1, first, tensor))
        return Plan(
            trace,
            evict=tuple(sorted(evict)),
            fetch=tuple(sorted(fetches)),
            retain=tuple(_large(trace, "param")),
        )


def _large(trace: StepTrace, tag: str) -> list[int]:
    persistent = np.flatnonzero(trace.large & (trace.kind == Kind.PERSISTENT)).tolist()
    return [tensor for tensor in persistent if trace.tags[tensor] == tag]
