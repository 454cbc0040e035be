"""How long a rewritten step takes at a budget: a bound in closed form, and an estimate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ...devices import DeviceProfile
from ...policies.umem import Umem
from ...trace.step import Floats, StepTrace
from ..spans import Spans


def derated(device: DeviceProfile, factor: float) -> DeviceProfile:
    """The same device behind a slower link."""
    return dataclasses.replace(
        device,
        bytes_per_us_in=device.bytes_per_us_in * factor,
        bytes_per_us_out=device.bytes_per_us_out * factor,
    )


def room_of(step: StepTrace, budget: int) -> int:
    """Bytes for what tensors hold: pages of small ones have holes (policies/occupancy.py)."""
    return budget - min(step.small_bytes // 4, budget // 64)


def floors_us(
    step: StepTrace,
    device: DeviceProfile,
    room: int,
    factors: Sequence[float],
    begins: Sequence[int] = (0,),
) -> Floats:
    """The turning-point bound of `bounds.closed_form_floor` behind each of several links."""
    spans = Spans(step)
    over = np.maximum(spans.need - room, 0)
    compute = step.compute_us
    found = np.full(len(factors), compute)
    if over.any():
        most = int(over.max()) / min(device.bytes_per_us_in, device.bytes_per_us_out)
        for begin in begins:
            before, after = spans.beside(begin)
            out, back = spans.transfers_us(over, device, begin)
            for i, factor in enumerate(factors):
                turn = np.maximum(before, out / factor) + np.maximum(after, back / factor)
                found[i] = max(found[i], float(turn.max()), most / factor)
    return found


def estimate_us(
    step: StepTrace, device: DeviceProfile, budget: int, *, compare: bool = True
) -> float:
    """What the default policy's swapping makes of the step (see `Umem.estimate_us`)."""
    return Umem().estimate_us(step, device, budget, compare=compare)
