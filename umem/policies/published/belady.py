"""Baseline `belady`: on demand, evicting the tensor with the furthest next use."""

from __future__ import annotations

import numpy as np

from ...base.device_profiles import DeviceProfile
from ...trace.step_trace import StepTrace
from ..base import Plan


class Belady:
    """The oracle of eviction on demand: the tensor with the furthest next use leaves.

    It moves the fewest bytes of any policy without prefetch if all sizes are equal, and nearly so
    if not (finding the optimum is then NP-hard); its transfers are not overlapped. Source: Belady,
    "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2),
    1966.
    """

    name = "belady"

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:  # noqa: ARG002
        """Return a plan without moves, which differs from `lru` by its order of eviction."""
        clean = np.flatnonzero(trace.large & trace.clean)
        return Plan(trace, order="furthest", read_mostly=tuple(clean.tolist()))
