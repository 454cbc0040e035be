"""Scores of a rewritten step at a budget: a lower bound in closed form, and an estimate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ...analysis.idle_intervals import IdleIntervals
from ...base.device_profiles import DeviceProfile
from ...trace.step_trace import Floats, StepTrace


def derated(device: DeviceProfile, factor: float) -> DeviceProfile:
    """Return the device with the bandwidth of its link multiplied by `factor`."""
    return dataclasses.replace(
        device,
        bytes_per_us_in=device.bytes_per_us_in * factor,
        bytes_per_us_out=device.bytes_per_us_out * factor,
    )


def floors_us(
    step: StepTrace,
    device: DeviceProfile,
    room: int,
    factors: Sequence[float],
    begins: Sequence[int] = (0,),
) -> Floats:
    """Return the turning-point bound of `bounds.closed_form_floor` in µs, for each link factor."""
    # It ranks choices, in which tensors that the program only holds hardly differ.
    spans = IdleIntervals(step, kept=np.zeros(step.n_tensors, bool))
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
