"""The plan guard: it compares the first steps of each plan with the step it was made from."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ..base.native import core

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..policies.base import Plan

    Spare: TypeAlias = Callable[[], Plan]

STEPS = 2  # steps by the plan, all of which have to be worse
# Steps by the first of two plans, of which the last counts: until then what the steps before left
# behind has gone, and copies have been made.
STEPS_OF_FIRST = 3
MORE = 1.02  # ratio of bytes
SLOWER = 1.1  # ratio of times, above the usual variation between steps


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

    Args:
        device: the number of the device whose moved bytes count; None: those of all.
    """

    def __init__(self, device: int | None = None) -> None:
        self._device = device
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
        stats = core.stats(self._device)
        us = stats["stall_us"] if self._soft else time.perf_counter() * 1e6
        return Cost(stats["bytes_in"] + stats["bytes_out"], us)


class Verdict(NamedTuple):
    """Whatever replaces a plan that was tested: one for the same steps; None: lru."""

    plan: Plan | None
    why: str


class _Trial:
    """A plan under test, and the spare one that is tested after it."""

    def __init__(
        self, without: Cost | None, first: Plan | None, spare: Spare | None, both: bool
    ) -> None:
        self.without, self.first, self.spare, self.both = without, first, spare, both
        self.steps: list[Cost] = []
        self.steps_of_first: list[Cost] = []  # once the spare one is tested

    @property
    def over(self) -> bool:
        """Whether the plan under test has had its steps."""
        two = self.both and self.spare is not None and not self.steps_of_first
        return len(self.steps) >= (STEPS_OF_FIRST if two else STEPS)

    def judge(self) -> tuple[bool, Verdict | None]:
        """Return whether the test is over, and what is done with the plan that was tested."""
        known = self.without
        failed = known is not None and all(cost.worse_than(known) for cost in self.steps)
        if not self.steps_of_first and self.spare is not None and self._may_gain(failed):
            self.steps_of_first, self.steps = self.steps, []
            return False, Verdict(self.spare(), _why(self.steps_of_first, known))
        if not self.steps_of_first or not self.both:
            return True, Verdict(None, _why(self.steps, known)) if failed else None
        first, spare = self.steps_of_first[-1], self.steps[-1]
        most = MORE * min(c.bytes for c in (first, spare, known) if c is not None)
        if first.bytes <= most:
            return True, Verdict(self.first, _why(self.steps, first))
        if spare.bytes <= most:
            return True, None
        return True, Verdict(None, _why(self.steps, known))

    def _may_gain(self, failed: bool) -> bool:
        return failed or (self.both and self.steps[-1].bytes > 0)


class PlanGuard:
    """The plans under test, by their numbers.

    A plan fails whose first steps all move clearly more and take clearly longer than a step without
    it. Its spare plan is tested next, and if that fails too, lru goes on.
    """

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}

    def begin(
        self,
        number: int,
        without: Cost | None,
        plan: Plan | None = None,
        spare: Spare | None = None,
        *,
        both: bool = False,
    ) -> None:
        """Start testing plan `number`.

        Args:
            number: as native code gave it.
            without: the cost of a step without any plan; None where it is not known: then only
                the two plans are compared, if both are tested.
            plan, spare: what to do in the plan's steps now, and what makes the plan to try next.
            both: test the spare plan in any case, and keep what moves the fewest bytes; of nearly
                equal ones the first.
        """
        self._trials[number] = _Trial(without, plan, spare, both)
        if len(self._trials) > core.MAX_PLANS:
            del self._trials[min(self._trials)]

    @property
    def busy(self) -> bool:
        """Whether a plan under test has had steps and awaits more."""
        return any(trial.steps or trial.steps_of_first for trial in self._trials.values())

    def clear(self) -> None:
        """Forget all plans."""
        self._trials.clear()

    def judge(self, number: int, step: Cost) -> Verdict | None:
        """Return what to do with a plan instead of what it does, after some steps by it."""
        trial = self._trials.get(number)
        if trial is None:
            return None
        trial.steps.append(step)
        if not trial.over:
            return None
        over, verdict = trial.judge()
        if over:
            del self._trials[number]
        return verdict


def _why(steps: list[Cost], other: Cost | None) -> str:
    moved, took = (statistics.fmean(each) for each in zip(*steps, strict=True))
    why = f"its steps moved {moved / 2**20:.0f} MiB in {took / 1e3:.1f} ms"
    if other is None:
        return why
    return f"{why}, and without it {other.bytes / 2**20:.0f} MiB in {other.us / 1e3:.1f} ms"
