"""Whether plans are worth following: the first steps by each, beside the one it was made from."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

from .native import core

STEPS = 2  # by the plan, each of which has to be worse
MORE = 1.02  # ratio of bytes
SLOWER = 1.1  # ratio of times: clear of what steps differ by anyhow
_MOST = 8  # plans on trial: native code keeps no more


class Cost(NamedTuple):
    """What one step took."""

    bytes: int  # moved, both ways
    us: float  # see `Meter`

    def worse_than(self, other: Cost) -> bool:
        """By a clear margin, in both: what moves more may hide more."""
        return self.bytes > MORE * other.bytes and self.us > SLOWER * other.us


class Meter:
    """Costs of steps, from a `start` to the next `read`.

    Time is the host's, so that both have to be called with the device idle. On the software device
    it is the virtual time that compute waited: its compute takes none.
    """

    def __init__(self) -> None:
        self._begin = Cost(0, 0)
        self._soft = False

    def start(self) -> None:
        """A step begins."""
        self._soft = core.current_options().device == "soft"
        self._begin = self._now()

    def read(self) -> Cost:
        """The cost of the step that ends."""
        now = self._now()
        return Cost(now.bytes - self._begin.bytes, now.us - self._begin.us)

    def _now(self) -> Cost:
        stats = core.stats()
        us = stats["stall_us"] if self._soft else time.perf_counter() * 1e6
        return Cost(stats["bytes_in"] + stats["bytes_out"], us)


class Trials:
    """The plans that still have to show what they are worth, by their numbers."""

    def __init__(self) -> None:
        self._steps: dict[int, list[Cost]] = {}  # the first is the one without the plan

    def begin(self, plan: int, without: Cost) -> None:
        """From now on; `without` is what a step took that nothing was planned in."""
        self._steps[plan] = [without]
        if len(self._steps) > _MOST:
            del self._steps[min(self._steps)]

    def clear(self) -> None:
        """There are no plans any more."""
        self._steps.clear()

    def failed(self, plan: int, step: Cost) -> str | None:
        """Why the plan is given up, once, after `STEPS` steps by it; else None."""
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
