"""``umem plan --recompute``: evaluation of activation recomputation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .plan_bound import Bound, bound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..base.device_profiles import DeviceProfile
    from ..capture.recording import Recording
    from ..recompute.planner.plan import RecomputePlan
    from ..simulation.replay import Result
    from ..trace.step_trace import StepTrace

ALL = ("swap", "recompute", "per_block", "auto")


@dataclass(frozen=True)
class Row:
    """Result of one mode. Sizes in bytes, times in µs."""

    mode: str
    result: Result | None  # None: no plan found that fits
    again_us: float = 0.0  # recomputed ops
    peak_bytes: int = 0  # without swapping
    seconds: float = 0.0  # for planning and replay
    plan: RecomputePlan | None = None  # the plan that a program would execute

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON."""
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
    """Results of all requested modes."""

    rows: list[Row]
    compute_us: float  # the step without recomputation
    bound: Bound  # for all modes

    def as_dict(self) -> dict[str, Any]:
        """Return the table for JSON."""
        return {
            "lower_bound_us": self.bound.us,
            "lower_bound_missing": self.bound.why_not,
            "modes": [row.as_dict() for row in self.rows],
        }


def modes(given: str | None) -> tuple[str, ...]:
    """Return the modes that the option names; an empty list without it.

    Raises:
        ConfigError: no such mode.
    """
    if given is None or given == "all":
        return ALL if given else ()
    from ..recompute.planner.plan import check

    check(given, "all")
    return (given,)


def table(
    step: StepTrace,
    recording: Recording,
    device: DeviceProfile,
    budget: int,
    modes: Iterable[str],
) -> Table:
    """Plan and replay each mode.

    Raises:
        PlanError: the step does not belong to the recording.
    """
    from ..recompute.planner.modes import RecomputePlanner, executable, graph_of
    from ..simulation.replay import simulate_recompute

    graph, ordinals = graph_of(step, recording)
    planner = RecomputePlanner(graph, device, budget)
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
    return Table(rows, step.compute_us, bound(graph, device, budget))
