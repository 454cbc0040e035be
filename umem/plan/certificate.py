"""All bounds of a step at a budget: what a measured or replayed step is held against."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..devices import DeviceProfile
from ..trace.step import StepTrace
from .bounds import (
    closed_form_floor,
    largest_op,
    least_budget,
    lower_bound_bytes_in,
    lower_bound_bytes_out,
)
from .bounds_lp import lp_bytes, lp_time_floor


@dataclass(frozen=True)
class Certificate:
    """What no policy gets below, in steady state. Sizes in bytes a step, times in µs.

    `bound` is what sets `floor_us` (see `bounds.Floor`), at op `op` named `op_name`; -1 and "" of
    compute. `lp_floor_us` is at least `floor_us`; None where it was not asked for.
    """

    device: str
    budget: int
    least_budget: int
    largest_op: int
    largest_op_name: str
    peak_bytes: int
    bytes_in: int
    bytes_out: int
    compute_us: float
    floor_us: float
    bound: str
    op: int
    op_name: str
    lp_floor_us: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the whole step can stay on the device."""
        return self.peak_bytes <= self.budget


def certify(
    trace: StepTrace, device: DeviceProfile, budget: int, *, lp: bool = False
) -> Certificate:
    """The bounds at `budget`; with `lp` also those by linear programs, which take seconds.

    Raises:
        PlanError: an op accesses more than `budget` (`bounds.least_budget` gives one that works).
        NotSupportedError: `lp` without highspy.
    """
    floor = closed_form_floor(trace, device, budget)
    bytes_in = lower_bound_bytes_in(trace, budget)
    if lp:
        # What the solver may be off by is no reason for a byte more.
        bytes_in = max(bytes_in, math.floor(lp_bytes(trace, budget) * (1 - 1e-6)))
    most = largest_op(trace).op
    return Certificate(
        device=device.name,
        budget=budget,
        least_budget=least_budget(trace),
        largest_op=most,
        largest_op_name=trace.op_names[most] if most >= 0 else "",
        peak_bytes=trace.peak_bytes,
        bytes_in=bytes_in,
        bytes_out=lower_bound_bytes_out(trace, budget),
        compute_us=trace.compute_us,
        floor_us=floor.us,
        bound=floor.bound,
        op=floor.op,
        op_name=trace.op_names[floor.op] if floor.op >= 0 else "",
        lp_floor_us=lp_time_floor(trace, device, budget) if lp else None,
    )
