"""`conv_lru`: on demand, the outputs of convolutions and of matrix products leave first."""

from __future__ import annotations

from ..devices import DeviceProfile
from ..trace.step import StepTrace


class ConvLru:
    """`lru` that prefers the outputs of ops that are dear to compute again.

    Native: no plan. Source: Wang et al., "SuperNeurons: dynamic GPU memory management for training
    deep neural networks", PPoPP 2018.
    """

    name = "conv_lru"

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> None:  # noqa: ARG002
        """None: the engine decides under pressure."""
        return
