"""The lower bound in the answers of ``umem plan``, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile
    from ..recompute.planner.graph import RecomputeGraph
    from ..recompute.planner.host_updates import Update


class Bound(NamedTuple):
    """One of the two is None."""

    us: float | None
    why_not: str | None

    def text(self, compute_us: float) -> str:
        """Return a phrase for the terminal."""
        if self.us is None:
            return f"not computed: {self.why_not}"
        return f"{self.us / compute_us:.2f} x compute, by a linear program"


def bound(
    graph: RecomputeGraph, device: DeviceProfile, budget: int, updates: Sequence[Update] = ()
) -> Bound:
    """Return the min step time of any plan: see `lower_bound_us`."""
    from ..errors import NotSupportedError, PlanError
    from ..recompute.planner.bound import lower_bound_us

    try:
        return Bound(lower_bound_us(graph, device, budget, updates), None)
    except (NotSupportedError, PlanError) as error:  # PlanError: the time limit, or no step fits
        return Bound(None, str(error))
