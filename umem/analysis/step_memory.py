"""The memory of a traced step by kind, as `formulas` gives it for a configuration."""

from __future__ import annotations

import numpy as np

from ..capture.recording import Recording
from ..trace.step_trace import Ints, StepTrace
from .formulas import MemoryEstimate

_FIELDS = {"param": "params", "grad": "grads", "optimizer": "optimizer", "input": "inputs",
           "activation": "activations", "workspace": "workspace"}  # fmt: skip


def requested_bytes(step: StepTrace, recording: Recording) -> Ints:
    """Return the requested bytes of each tensor, [m], before the device rounds them up."""
    return np.array([recording.blocks[i].bytes for i in step.source.tolist()], np.int64)


def of_step(
    step: StepTrace, recording: Recording, resident_bytes: int, workspace: int = 0
) -> MemoryEstimate:
    """Return the requested bytes alive at the step's peak by kind, and the overhead on top.

    Args:
        step: the step.
        recording: the recording that it comes from.
        resident_bytes: bytes that the step takes if nothing moves (`replay.resident_budget`):
            tensors in whole pages, and the segments of small ones. The excess over the requested
            bytes is fragmentation.
        workspace: bytes of libraries, absent from a trace on fake tensors.
    """
    peak_op = int(step.live_bytes.argmax())
    alive = ((step.first <= peak_op) & (step.last >= peak_op)).nonzero()[0]
    sizes = requested_bytes(step, recording)
    kinds: dict[str, int] = {}
    for tensor in alive:
        # A tensor of any other tag is alive during a part of the step only.
        kind = _FIELDS.get(step.tags[tensor], "temp")
        kinds[kind] = kinds.get(kind, 0) + int(sizes[tensor])
    asked = sum(kinds.values())
    kinds["workspace"] = kinds.get("workspace", 0) + workspace
    return MemoryEstimate(**kinds, fragmentation=max(resident_bytes - asked, 0))
