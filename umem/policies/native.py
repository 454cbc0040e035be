"""Policies that native code runs without a plan: `none`, `lru`, `conv_lru`."""

from __future__ import annotations

from ..base.device_profiles import DeviceProfile
from ..trace.step_trace import StepTrace


class _Native:
    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> None:  # noqa: ARG002
        """Return None: the driver or the engine decides under pressure."""
        return


class Unmanaged(_Native):
    """Managed memory as the driver runs it: the reference of every comparison.

    Native: no plan. Source: NVIDIA, CUDA C++ Programming Guide, "Unified Memory Programming".
    """

    name = "none"


class Lru(_Native):
    """Fetch an op's absent inputs before it; under pressure evict the least recently used.

    Native: no plan. Optimal for a stack of activations apart from the overlap that it gives up, and
    the worst policy for a cycle of weights. Source: Belady, "A study of replacement algorithms for
    a virtual-storage computer", IBM Systems Journal 5(2), 1966.
    """

    name = "lru"


class ConvLru(_Native):
    """A variant of `lru` that evicts the outputs of convolution-like layers first.

    Native: no plan. Source: Wang et al., "SuperNeurons: dynamic GPU memory management for training
    deep neural networks", PPoPP 2018.
    """

    name = "conv_lru"
