"""`none`: umem keeps out, and the driver moves pages on faults."""

from __future__ import annotations

from ..devices import DeviceProfile
from ..trace.step import StepTrace


class Unmanaged:
    """Managed memory as the driver runs it: the base line of every comparison.

    Native: no plan. Source: NVIDIA, CUDA C++ Programming Guide, "Unified Memory Programming".
    """

    name = "none"

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> None:  # noqa: ARG002
        """None: the driver decides."""
        return
