"""`belady`: on demand, whoever is needed last leaves."""

from __future__ import annotations

import numpy as np

from ..devices import DeviceProfile
from ..trace.step import StepTrace
from .base import Plan


class Belady:
    """The oracle of eviction on demand: under pressure the furthest next use leaves.

    It moves the fewest bytes that a policy without prefetch can where sizes are equal, and nearly
    so where not (finding the optimum is NP-hard then); its transfers are not overlapped. Source:
    Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal
    5(2), 1966.
    """

    name = "belady"

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:  # noqa: ARG002
        """A plan without moves: the order of eviction differs from `lru`, and what is clean."""
        clean = np.flatnonzero(trace.large & trace.clean)
        return Plan(trace, order="furthest", read_mostly=tuple(clean.tolist()))
