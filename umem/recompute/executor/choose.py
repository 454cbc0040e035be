"""The choice of activations to drop for a traced step, by the planner's modes."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...base.units import format_bytes
from ..planner.plan import MODES, RecomputePlan

if TYPE_CHECKING:
    from ...base.device_profiles import DeviceProfile
    from ...capture.recording import Recording
    from ...config.parsers import Budget
    from ...trace.step_trace import StepTrace
    from ..planner.modes import RecomputePlanner
    from ..planner.rewrite import Rewritten

_log = logging.getLogger("umem")

LIVE_MODES = tuple(mode for mode in MODES if mode != "swap")
BY_BUDGET = frozenset({"auto", "recompute"})  # others ignore the budget


@dataclass(frozen=True)
class Chosen:
    """A plan and its expected effect. Sizes in bytes, times in µs."""

    plan: RecomputePlan
    peak_bytes: int  # without the plan
    peak_with: int  # with the plan, without swapping
    compute_us: float
    recompute_us: float


def choose(
    recording: Recording,
    device: DeviceProfile,
    mode: str,
    *,
    budget: Budget | None,
    outside: int,
    swaps: bool,
) -> Chosen:
    """Choose a plan for a step that was recorded.

    Args:
        recording: the trace.
        device: the device profile to plan with.
        mode: one of LIVE_MODES.
        budget: the device's budget; a percentage is of the step's own peak; None if the mode needs
            none.
        outside: bytes of the budget used by tensors outside of the trace.
        swaps: whether tensors that do not fit are swapped; if not, mode "auto" plans without.

    Raises:
        ConfigError: the profile has no compute throughput.
        PlanError: the ops of the step are not those of the recording.
    """
    from ...capture import roofline
    from ...trace.step_builder import last_step
    from ..planner import modes

    begin = time.perf_counter()
    step = last_step(recording.device_events(roofline.clock(device)))
    graph, ordinals = modes.graph_of(step, recording)
    room = step.peak_bytes if budget is None else _room(step, budget, outside)
    planner = modes.RecomputePlanner(graph, device, room)
    alone = mode == "recompute" or (mode == "auto" and not swaps)
    new = _alone(planner, room) if alone else planner.plan(mode)
    assert new is not None  # only recomputation alone can fail
    plan = modes.executable(new, recording, ordinals)
    _log.info(
        "recompute, mode %s: %d of %d ops of the forward pass are dropped, chosen in %.0f ms",
        mode, len(plan.drop), len(plan.names), (time.perf_counter() - begin) * 1e3,
    )  # fmt: skip
    return Chosen(plan, step.peak_bytes, new.step.peak_bytes, step.compute_us, new.recompute_us)


def _room(step: StepTrace, budget: Budget, outside: int) -> int:
    """Return the bytes available to the step; at least those of its largest op, needed anyway."""
    asked = budget.bytes or int(step.peak_bytes * (budget.percent or 100) / 100)
    return max(asked - outside, int(step.working_set.max(initial=0)))


def _alone(planner: RecomputePlanner, room: int) -> Rewritten:
    """Return the shortest step that fits without swapping; else warn, return the lowest peak."""
    searched = planner.plan("recompute")
    rules = [planner.plan(mode) for mode in ("swap", "speed", "per_block", "memory", "auto")]
    found = [new for new in (searched, *rules) if new is not None]
    fitting = [new for new in found if new.step.peak_bytes <= room]
    if fitting:
        return min(fitting, key=lambda new: new.recompute_us)
    new = min(found, key=lambda new: new.step.peak_bytes)
    _log.warning(
        "recomputation alone does not fit the model's step into %s; the lowest peak found is %s. "
        "With umem.enable() the rest is swapped",
        format_bytes(room), format_bytes(new.step.peak_bytes),
    )  # fmt: skip
    return new
