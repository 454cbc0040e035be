"""``umem plan --recompute``: what it would bring not to keep everything for backward."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..devices import DeviceProfile
    from ..plan.recompute.plan import RecomputePlan
    from ..plan.recording import Recording
    from ..replay import Result
    from ..trace.step import StepTrace

ALL = ("swap", "recompute", "hybrid", "capuchin", "umem")


@dataclass(frozen=True)
class Row:
    """One way to choose. Sizes in bytes, times in µs."""

    mode: str
    result: Result | None  # None: no way was found that fits
    again_us: float = 0.0  # of the ops that run a second time
    peak_bytes: int = 0  # without swapping
    seconds: float = 0.0  # for planning and replay
    plan: RecomputePlan | None = None  # what a program executes

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "mode": self.mode,
            "replay": None if self.result is None else self.result.as_dict(),
            "again_us": self.again_us,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
            "plan": None if self.plan is None else self.plan.as_dict(),
        }


@dataclass(frozen=True)
class Table:
    """All ways that were asked for."""

    rows: list[Row]
    compute_us: float  # of the step without any
    bound_us: float | None  # that none is below; None without highspy

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"lower_bound_us": self.bound_us, "modes": [row.as_dict() for row in self.rows]}


def modes(given: str | None) -> tuple[str, ...]:
    """The ways that an option asks for; none without it.

    Raises:
        ConfigError: there is no such way.
    """
    if given is None or given == "all":
        return ALL if given else ()
    from ..plan.recompute.plan import check

    check(given, "all")
    return (given,)


def table(
    step: StepTrace,
    recording: Recording,
    device: DeviceProfile,
    budget: int,
    modes: tuple[str, ...],
) -> Table:
    """Plan and replay each way.

    Raises:
        PlanError: the step is not the recording's.
    """
    from ..errors import NotSupportedError
    from ..plan.recompute.bound import lower_bound_us
    from ..plan.recompute.modes import Planner, executable, graph_of
    from ..replay import simulate_recompute

    graph, ordinals = graph_of(step, recording)
    planner = Planner(graph, device, budget)
    rows = []
    for mode in modes:
        began = time.perf_counter()
        done = simulate_recompute(planner, mode)
        seconds = time.perf_counter() - began
        if done is None:
            rows.append(Row(mode, None, seconds=seconds))
            continue
        new, result = done.new, done.result
        plan = executable(new, recording, ordinals)
        rows.append(Row(mode, result, new.recompute_us, new.step.peak_bytes, seconds, plan))
    try:
        bound = lower_bound_us(graph, device, budget)
    except NotSupportedError:
        bound = None
    return Table(rows, step.compute_us, bound)
