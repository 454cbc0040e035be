"""``umem plan --optimizer``: the optimizer's updates on the host."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..base.progress import Advance, ignore
from .plan_bound import Bound, bound

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile
    from ..capture.recording import Recording
    from ..trace.step_trace import StepTrace


@dataclass(frozen=True)
class Answer:
    """The planned step. Sizes in bytes, times in µs."""

    share: float  # the host's part of `bytes`, 0 to 1
    bytes: int  # all parameters whose updates the host can do
    step_us: float
    compute_us: float  # the plain step's
    bound: Bound  # for any share and plan
    host_us: float  # the host's working time
    again_us: float  # recomputed ops
    bytes_in: int
    bytes_out: int
    budget: int
    seconds: float  # for planning and replay

    def as_dict(self) -> dict[str, Any]:
        """Return the answer for JSON."""
        values = asdict(self)
        del values["bound"]
        return {**values, "bound_us": self.bound.us, "bound_missing": self.bound.why_not}


def answer(
    step: StepTrace,
    recording: Recording,
    device: DeviceProfile,
    budget: int,
    share: float | None,
    *,
    advance: Advance = ignore,
) -> Answer:
    """Plan and replay the step with updates on the host, swapping and recomputation.

    `advance` is that of `simulate_updates`.

    Raises:
        PlanError: the step does not belong to the recording.
    """
    from ..recompute.planner.host_updates import candidates
    from ..recompute.planner.modes import graph_of
    from ..simulation.replay import simulate_updates

    graph, _ = graph_of(step, recording)
    began = time.perf_counter()
    found = simulate_updates(graph, device, budget, share, advance=advance)
    seconds = time.perf_counter() - began
    known = candidates(step)
    result = found.recomputed.result
    return Answer(
        share=found.share,
        bytes=known.bytes,
        step_us=result.step_us,
        compute_us=step.compute_us,
        bound=bound(graph, device, budget, known.updates),
        host_us=result.host_us,
        again_us=found.recomputed.new.recompute_us,
        bytes_in=result.bytes_in,
        bytes_out=result.bytes_out,
        budget=result.budget,
        seconds=seconds,
    )
