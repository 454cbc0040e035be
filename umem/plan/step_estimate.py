"""What a traced step takes by kind, as `memory_model` says it of a configuration."""

from __future__ import annotations

import numpy as np

from ..trace.step import Ints, StepTrace
from .memory_model import Estimate
from .recording import Recording

_FIELDS = {"param": "params", "grad": "grads", "optimizer": "optimizer", "input": "inputs",
           "activation": "activations", "workspace": "workspace"}  # fmt: skip


def asked_bytes(step: StepTrace, recording: Recording) -> Ints:
    """[m] Of each tensor the bytes asked for, without what the device rounds them up by."""
    return np.array([recording.blocks[i].bytes for i in step.source.tolist()], np.int64)


def of_step(
    step: StepTrace, recording: Recording, resident_bytes: int, workspace: int = 0
) -> Estimate:
    """The bytes asked for that are alive at the step's peak, and what they take beyond.

    Args:
        step: of which the kinds at the peak are taken.
        recording: where it comes from.
        resident_bytes: what the step takes where nothing moves (`replay.resident_budget`): tensors
            in whole pages, and the segments of small ones. What was not asked for is fragmentation.
        workspace: bytes of libraries that no trace on fake tensors has.
    """
    peak_op = int(step.live_bytes.argmax())
    alive = ((step.first <= peak_op) & (step.last >= peak_op)).nonzero()[0]
    sizes = asked_bytes(step, recording)
    kinds: dict[str, int] = {}
    for tensor in alive:
        # Whatever else a tensor is for, it lives within a part of the step.
        kind = _FIELDS.get(step.tags[tensor], "temp")
        kinds[kind] = kinds.get(kind, 0) + int(sizes[tensor])
    asked = sum(kinds.values())
    kinds["workspace"] = kinds.get("workspace", 0) + workspace
    return Estimate(**kinds, fragmentation=max(resident_bytes - asked, 0))
