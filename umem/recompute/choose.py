"""What of a traced step to drop, by the planner's modes."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..plan.recompute.plan import MODES, RecomputePlan
from ..units import format_bytes

if TYPE_CHECKING:
    from ..devices import DeviceProfile
    from ..plan.recompute.modes import Planner
    from ..plan.recompute.rewrite import Rewritten
    from ..plan.recording import Recording
    from ..trace.step import StepTrace
    from ..values import Budget

_log = logging.getLogger("umem")

LIVE_MODES = tuple(mode for mode in MODES if mode != "swap")
BY_BUDGET = frozenset({"umem", "recompute", "capuchin", "cost"})  # others drop the same at any


@dataclass(frozen=True)
class Chosen:
    """A plan, and what it is expected to do. Sizes in bytes, times in µs."""

    plan: RecomputePlan
    peak_bytes: int  # of the model's step, before
    peak_with: int  # and with the plan, without any swapping
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
    """Choose for a step that was traced on fake tensors.

    Args:
        mode: one of LIVE_MODES.
        budget: of the device; a percentage is of the step's own peak; None where the mode needs
            none.
        outside: bytes of the budget that are taken by what the trace has not.
        swaps: whether something swaps what does not fit; if not, mode "umem" does without.

    Raises:
        ConfigError: nothing is known of the device's compute.
        PlanError: the ops of the step are not those of the recording.
    """
    from ..plan import roofline
    from ..plan.recompute import modes
    from ..trace.steps import StepBuilder

    begin = time.perf_counter()
    builder = StepBuilder()
    for event in recording.events(roofline.clock(device)):
        builder.add(event)
    step = builder.step()
    graph, ordinals = modes.graph_of(step, recording)
    room = step.peak_bytes if budget is None else _room(step, budget, outside)
    planner = modes.Planner(graph, device, room)
    alone = mode == "recompute" or (mode == "umem" and not swaps)
    new = _alone(planner, room) if alone else planner.plan(mode)
    assert new is not None  # but for recomputation alone, every mode has an answer
    plan = modes.executable(new, recording, ordinals)
    _log.info(
        "recompute, mode %s: %d of %d ops of the forward pass are dropped, chosen in %.0f ms",
        mode, len(plan.drop), len(plan.names), (time.perf_counter() - begin) * 1e3,
    )  # fmt: skip
    return Chosen(plan, step.peak_bytes, new.step.peak_bytes, step.compute_us, new.recompute_us)


def _room(step: StepTrace, budget: Budget, outside: int) -> int:
    """Bytes for the step; no less than its largest op, which the budget has to have anyway."""
    asked = budget.bytes or int(step.peak_bytes * (budget.percent or 100) / 100)
    return max(asked - outside, int(step.working_set.max(initial=0)))


def _alone(planner: Planner, room: int) -> Rewritten:
    """The shortest step without swapping that fits; else the lowest peak, and a warning."""
    searched = planner.plan("recompute")
    rules = [planner.plan(mode) for mode in ("swap", "speed", "per_block", "memory", "umem")]
    found = [new for new in (searched, *rules) if new is not None]
    fitting = [new for new in found if new.step.peak_bytes <= room]
    if fitting:
        return min(fitting, key=lambda new: new.recompute_us)
    new = min(found, key=lambda new: new.step.peak_bytes)
    _log.warning(
        "recomputation alone does not fit the model's step into %s: %s is the least found; with "
        "umem.enable() the rest is swapped",
        format_bytes(room), format_bytes(new.step.peak_bytes),
    )  # fmt: skip
    return new
