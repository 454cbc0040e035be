"""The plan guard: it compares the first steps of each plan with the step it was made from."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

from ..base.native import core

STEPS = 2  # steps by the plan, all of which have to be worse
MORE = 1.02  # ratio of bytes
SLOWER = 1.1  # ratio of times, above the usual variation between steps
_MAX = 8  # plans under test; native code keeps no more


class Cost(NamedTuple):
    """The cost of one step."""

    bytes: int  # moved, both ways
    us: float  # see `Meter`

    def worse_than(self, other: Cost) -> bool:
        """Return whether both figures are clearly worse: a step that moves more may hide more."""
        return self.bytes > MORE * other.bytes and self.us > SLOWER * other.us


class Meter:
    """A meter for the cost of steps, from `start` to `read`.

    Time is host time, so both have to be called while the device is idle. On the software device it
    is the virtual time that compute waited, because its compute takes no time.
    """

    def __init__(self) -> None:
        self._begin = Cost(0, 0)
        self._soft = False

    def start(self) -> None:
        """Start measuring a step."""
        self._soft = core.current_options().device == "soft"
        self._begin = self._now()

    def read(self) -> Cost:
        """Return the cost since `start`."""
        now = self._now()
        return Cost(now.bytes - self._begin.bytes, now.us - self._begin.us)

    def _now(self) -> Cost:
        stats = core.stats()
        us = stats["stall_us"] if self._soft else time.perf_counter() * 1e6
        return Cost(stats["bytes_in"] + stats["bytes_out"], us)


class PlanGuard:
    """The plans under test, by their numbers."""

    def __init__(self) -> None:
        self._steps: dict[int, list[Cost]] = {}  # the first is the one without the plan

    def begin(self, plan: int, without: Cost) -> None:
        """Start testing a plan; `without` is the cost of a step without any plan."""
        self._steps[plan] = [without]
        if len(self._steps) > _MAX:
            del self._steps[min(self._steps)]

    def clear(self) -> None:
        """Forget all plans."""
        self._steps.clear()

    def failed(self, plan: int, step: Cost) -> str | None:
        """Return why to give the plan up, once, after `STEPS` steps by it; else None."""
        steps = self._steps.get(plan)
        if steps is None:
            return None
        steps.append(step)
        if len(steps) <= STEPS:
            return None
        without, *by = self._steps.pop(plan)
        if not all(cost.worse_than(without) for cost in by):
            return None
        moved, took = (statistics.fmean(each) for each in zip(*by, strict=True))
        return (
            f"its steps moved {moved / 2**20:.0f} MiB in {took / 1e3:.1f} ms, and without it "
            f"{without.bytes / 2**20:.0f} MiB in {without.us / 1e3:.1f} ms"
        )
