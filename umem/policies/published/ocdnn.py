"""Baseline `ocdnn`: prefetch just ahead of an op; evict first what only backward needs."""

from __future__ import annotations

from ...base.device_profiles import DeviceProfile
from ...trace.step_trace import StepTrace
from ..base import Move, Plan
from ..default.occupancy import movable_gaps
from .phases import fetch, saved_for_backward


class OcDnn:
    """Prefetch `ahead` ops before the use, and advise eviction after the last use in forward.

    The advice moves nothing: advised tensors are evicted first under pressure. Outputs need no
    prefetch here, because newly allocated memory arrives populated.

    Source: Awan et al., "OC-DNN: exploiting advanced unified memory capabilities in CUDA 9 and
    Volta GPUs for out-of-core DNN training", HiPC 2018.
    """

    name = "ocdnn"

    def __init__(self, ahead: int = 1) -> None:
        self.ahead = ahead

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:  # noqa: ARG002
        """Return a fetch for every gap, and evict-first marks from forward to backward."""
        saved = saved_for_backward(trace)
        gaps = movable_gaps(trace)
        fetches = [
            fetch(trace, max(start, end - 1 - self.ahead), end, tensor)
            for tensor, start, end in zip(
                gaps.tensor.tolist(), gaps.start.tolist(), gaps.end.tolist(), strict=True
            )
            if start >= 0
        ]
        return Plan(
            trace,
            evict_first=tuple(map(Move, saved.start.tolist(), saved.tensor.tolist())),
            fetch=tuple(sorted(fetches)),
        )
