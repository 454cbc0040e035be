"""What of a traced step to drop, by the planner's modes."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING

from ..errors import PlanError

if TYPE_CHECKING:
    from ..devices import DeviceProfile
    from ..plan.recompute.candidates import Selection
    from ..plan.recompute.graph import Graph
    from ..plan.recompute.plan import RecomputePlan
    from ..plan.recording import Recording
    from ..trace.step import StepTrace
    from ..values import Budget

_log = logging.getLogger("umem")

MODES = ("umem", "speed", "memory", "per_block", "hybrid")
BY_BUDGET = frozenset({"umem"})  # the others drop the same at any


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A plan, and what it is expected to do. Sizes in bytes, times in µs."""

    plan: RecomputePlan
    peak_bytes: int  # of the model's step, before
    peak_with: int  # and with the plan, without any swapping
    compute_us: float
    recompute_us: float


def choose(
    recording: Recording, device: DeviceProfile, mode: str, budget: Budget | None, outside: int
) -> Chosen:
    """Choose for a step that was traced on fake tensors.

    Args:
        mode: one of MODES.
        budget: of the device; a percentage is of the step's own peak; None where the mode needs
            none.
        outside: bytes of the budget that are taken by what the trace has not.

    Raises:
        ConfigError: nothing is known of the device's compute.
        PlanError: the ops of the step are not those of the recording.
    """
    import numpy as np

    from ..plan import roofline
    from ..plan.recompute.graph import Graph
    from ..plan.recompute.plan import RecomputePlan
    from ..plan.recompute.rewrite import rewrite
    from ..trace.steps import StepBuilder
    from ..values import PAGE_BYTES

    begin = time.perf_counter()
    builder = StepBuilder()
    for event in recording.events(roofline.clock(device)):
        builder.add(event)
    step = builder.step()
    works = [work for work in recording.last_step() if recording.touches_memory(work)]
    if tuple(work.name for work in works) != step.op_names:
        raise PlanError("the ops of the step are not those that were recorded; report this")
    graph = Graph(step, np.array([work.ordinal >= 0 for work in works], bool))
    room = None if budget is None else _room(step, budget, outside)
    keep = "memory" if mode == "memory" else "speed"
    selection = _selection(graph, device, mode, room)
    new = rewrite(graph, *selection, keep, labels=False)  # type: ignore[arg-type]
    drop = tuple(sorted({works[op].ordinal for op in new.drop_ops}))
    plan = RecomputePlan(recording.forward, drop, keep, PAGE_BYTES)  # type: ignore[arg-type]
    _log.info(
        "recompute, mode %s: %d of %d ops of the forward pass are dropped, chosen in %.0f ms",
        mode, len(drop), len(plan.names), (time.perf_counter() - begin) * 1e3,
    )  # fmt: skip
    return Chosen(plan, step.peak_bytes, new.step.peak_bytes, step.compute_us, new.recompute_us)


def _room(step: StepTrace, budget: Budget, outside: int) -> int:
    """Bytes for the step; no less than its largest op, which the budget has to have anyway."""
    asked = budget.bytes or int(step.peak_bytes * (budget.percent or 100) / 100)
    return max(asked - outside, int(step.working_set.max(initial=0)))


def _selection(graph: Graph, device: DeviceProfile, mode: str, room: int | None) -> Selection:
    from ..plan.recompute import candidates
    from ..plan.recompute.search import Search

    if mode == "per_block":
        return candidates.per_block(graph)
    if mode in ("speed", "memory", "hybrid"):
        return candidates.hybrid(graph)
    assert room is not None
    return Search(graph, device, room).best().selection
