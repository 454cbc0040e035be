"""One workload under every policy, budget and device: rows of plain figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from support.bounds_lp import lp_time_floor

from umem.analysis.bounds import BUDGET_MARGIN
from umem.base.device_profiles import DeviceProfile
from umem.base.units import PAGE_BYTES
from umem.errors import PlanError, UmemError
from umem.policies import registry
from umem.policies.base import Plan, Policy
from umem.session.resolve import is_native
from umem.simulation import replay
from umem.trace.step_trace import StepTrace

Row = dict[str, Any]

CERTIFIED = "auto"  # the policy whose distance from the closed-form floor is explained:
CERTIFY_FROM = 1.05  # the stronger bound from a linear program is computed at this ratio and above
PATIENCE_S = 900.0  # for a linear program: an unrolled LSTM's has 27,000 rows


@dataclass(frozen=True)
class Grid:
    """The replays of one workload. `devices`: the policies by the device's name."""

    fractions: tuple[str, ...]
    devices: dict[str, tuple[str, ...]]


class Timed:
    """A policy that measures its planning in CPU time, because other jobs run in parallel."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.name = policy.name
        self.seconds = 0.0

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan | None:
        begin = time.process_time()
        plan = self.policy.plan(trace, device, budget)
        self.seconds = time.process_time() - begin
        return plan


def rows(
    workload: str, step_on: Callable[[str], tuple[DeviceProfile, StepTrace]], grid: Grid
) -> Iterator[Row]:
    """Yield the replays of a workload as they finish; `step_on` gives its step on a device."""
    for name, policies in grid.devices.items():
        device, step = step_on(name)
        done: dict[tuple[str, int], Row] = {}  # budgets may be raised to the same one
        floors: dict[int, Row] = {}
        for fraction, budget in budgets(step, grid.fractions):
            about = {
                "workload": workload,
                "device": name,
                "fraction": fraction,
                "peak_bytes": step.peak_bytes,
                "tensors": step.n_tensors,
                "ops": step.n_ops,
            }
            for policy in sorted(policies, key=lambda name: name != CERTIFIED):
                key = policy, budget
                if key not in done:
                    done[key] = _replayed(step, policy, device, budget)
                if policy == CERTIFIED and budget not in floors:
                    floors[budget] = _certified(step, done[key], device, budget)
                yield {**about, **done[key], **floors.get(budget, {})}


def budgets(step: StepTrace, fractions: Sequence[str]) -> list[tuple[str, int]]:
    """(share of the peak, bytes); a share raised to the largest op's need has a `*`.

    So is one that cannot fit all small tensors next to the largest op's large ones: they share
    pages, and paging those measures the placement of tensors more than a policy.
    """
    large = int(step.sum_of_accesses(step.bytes * step.large).max(initial=0))
    pages = -(-int(BUDGET_MARGIN * large + _small_room(step)) // PAGE_BYTES)
    least = max(replay.min_budget(step), pages * PAGE_BYTES)
    wanted = [(fraction, int(step.peak_bytes * Fraction(fraction))) for fraction in fractions]
    return [(name, size) if size >= least else (f"{name}*", least) for name, size in wanted]


def _small_room(step: StepTrace) -> int:
    """Return whole pages for the small tensors, including the holes between them.

    Long-lived tensors keep pages that others have left: in most nets holes take a few percent of
    the small tensors' bytes, and about half in unrolled ones, where most tensors are small.
    """
    many = step.small_bytes > step.peak_bytes // 8
    holes = step.small_bytes // (2 if many else 4)
    return step.small_bytes + holes // PAGE_BYTES * PAGE_BYTES


def _replayed(step: StepTrace, policy: str, device: DeviceProfile, budget: int) -> Row:
    """Return the figures, or the reason of a failure: a policy that fails stops no other."""
    timed = Timed(registry.make(policy))
    try:
        result = replay.replay_step(step, policy if is_native(policy) else timed, device, budget)
    except (UmemError, MemoryError) as error:
        return {"policy": policy, "budget": budget, "error": f"{type(error).__name__}: {error}"}
    return {**result.as_dict(), "plan_ms": timed.seconds * 1e3}


def _certified(step: StepTrace, row: Row, device: DeviceProfile, budget: int) -> Row:
    """Return the floor of the linear program where the step is far from the one in closed form."""
    if "error" in row or row["step_us"] <= CERTIFY_FROM * row["floor_us"]:
        return {}
    whole = budget // PAGE_BYTES * PAGE_BYTES
    try:
        return {"lp_floor_us": lp_time_floor(step, device, whole, time_limit_s=PATIENCE_S)}
    except PlanError:  # it took too long: the row has the floor in closed form alone
        return {}
