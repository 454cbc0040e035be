"""Plans of one device, made from its recorded steps.

The first steps by a plan are compared with steps without it, and its choice may change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..base.native import core
from ..errors import TraceError
from ..policies import registry
from ..trace.ids import TensorIndex
from . import plan_guard
from .contest import Choice, Contest
from .layout_driver import Layouts
from .plan_guard import Cost, Meter, PlanGuard

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile
    from ..policies.base import Plan, Policy
    from ..policies.lowering import Columns
    from ..trace.step_trace import Bools, Ints, StepTrace
    from .plan_guard import Spare
    from .step_recording import StepRecording

_log = logging.getLogger("umem")

# Steps in a row that went by a plan, after which no more are recorded: as many as are tried.
_SETTLED = plan_guard.STEPS_OF_FIRST + plan_guard.STEPS
_TRIES = 16  # plans before steps in a row went by some, after which only
_EVERY = 100  # one step in so many is planned
_FEW = 0.1  # share of a step's ops that may go by a plan in a step that counts as one without
_SHOWN = 3  # problems of a plan that are logged
_IDLE = 8  # steps in a row that did not use the device, after which no more are recorded for it


class _Choices(NamedTuple):
    """The choices that there are for the steps of a plan."""

    first: Plan
    spare: Spare | None

    def columns(self, choice: Choice) -> Columns:
        """Return what native code executes; it knows where the tensors are."""
        from ..policies.base import Plan
        from ..policies.lowering import lower

        plan = self.first
        if choice is Choice.SECOND and self.spare is not None:
            plan = self.spare()
        elif choice is Choice.NONE:
            plan = Plan(self.first.trace)
        return lower(plan, lambda _: 0)


class PlannedStep(NamedTuple):
    """A recorded step as it was planned."""

    trace: StepTrace  # without segments
    addresses: Ints  # [m] of its tensors; 0 where that is not known
    device: DeviceProfile
    budget: int  # bytes

    @property
    def in_segments(self) -> StepTrace:
        """The step with segments in place of its small tensors, as plans have it."""
        from ..trace.segments import with_segments

        return with_segments(self.trace, self.addresses)


class DevicePlanner:
    """Plans steps with `policy` for a device until one goes by a plan, and when one no longer does.

    A policy with `rollback` has each plan given up whose first steps move more and take longer than
    the recorded one. Steps like that go on as by lru, and are not planned again.

    Args:
        number: the device's.
        profile, budget: asked before a plan; what device it is may not be known before its use.
        budget: in bytes.
        layouts: gets the steps that were planned.
        recording: has the steps of this device and of others.
    """

    def __init__(
        self,
        number: int,
        policy: Policy,
        profile: Callable[[], DeviceProfile],
        budget: Callable[[], int],
        *,
        layouts: Layouts,
        recording: StepRecording,
    ) -> None:
        self._number, self._policy, self._profile, self._budget = number, policy, profile, budget
        self._layouts, self._recording = layouts, recording
        self.wants_steps = False  # the next one is to be recorded
        self.plans = True  # until the policy says that it makes no plans
        self._steps = self._tries = self._settled = self._tried_at = self._idle = 0
        self._trials = PlanGuard() if getattr(policy, "rollback", False) else None
        self._meter = Meter(number)
        self._plans: dict[int, _Choices] = {}  # by number, where there is more than one choice
        self._contest: Contest | None = None
        self._pace = Meter(number)
        self._begun = self._begun_at = 0  # how often, and when last, recording began
        self._last = 0  # the plan that the step before went by
        self._reported = False
        self._recorded: dict[int, PlannedStep] = {}  # by plan; 0: the last one
        self.unplanned: dict[str, int] = {}  # recorded steps without a plan, by the reason

    def stop(self) -> None:
        """Plan no more; what is evicted is decided as by lru."""
        self.clear()
        self._layouts.stop()

    def restart(self) -> None:
        """Forget all plans, because the budget is another one."""
        self.clear()
        self._tries = self._settled = self._begun = 0

    def clear(self) -> None:
        """Forget all plans."""
        core.clear_plans(self._number)
        if self._trials is not None:
            self._trials.clear()
        self._plans.clear()
        self._recorded.clear()
        self._contest = None

    @property
    def planned(self) -> PlannedStep | None:
        """The recorded step whose plan the last step went by, or else the last one."""
        return self._recorded.get(self._last) or self._recorded.get(0)

    def not_planned(self, why: str, level: int = logging.WARNING) -> None:
        """Count a recorded step without a plan; say each reason once where memory is short."""
        first = why not in self.unplanned
        self.unplanned[why] = self.unplanned.get(why, 0) + 1
        stats = core.stats(self._number)
        short = stats["peak_live_bytes"] > stats["budget_bytes"]
        _log.log(
            level if first and short else logging.INFO,
            "the step is not planned%s, and goes as by lru: %s",
            self._here(),
            why,
        )

    def _here(self) -> str:
        return f" on device {self._number}" if self._number else ""

    def step_begins(self) -> None:
        """Start what measures a step."""
        if self.wants_steps:
            self._meter.start()
        if self._contest is not None and self._contest.running:
            self._pace.start()

    def step_passed(self) -> None:
        """Take the end of a step that did not use the device."""
        self._idle += 1
        if self._idle >= _IDLE:
            self.wants_steps = False

    def step_ended(self, *, recorded: bool) -> None:
        """Take the end of a step that used the device.

        Args:
            recorded: whether the recording has the step.
        """
        self._idle = 0
        self._steps += 1
        cost = self._meter.read() if recorded else None  # taking it waited for the device
        status = core.plan_status(self._number)
        self._layouts.step_ended(status["complete"])
        self._compete(status)
        if status["complete"]:
            alike = self._last in (0, status["complete"])
            self._last = status["complete"]
            if alike:  # else what the step before left behind is of another kind
                self._judge(status["complete"], cost)
            self._settled += 1
            testing = alike and self._trials is not None and self._trials.busy
            if self._settled >= _SETTLED:
                self._tries = 0  # what differs from here on is new
            if self._settled >= (_TRIES if testing else _SETTLED):
                self.wants_steps = False
            return
        self._settled = self._last = 0
        resting = self._tries >= _TRIES and self._steps - self._tried_at < _EVERY
        if recorded and not resting:
            self._tries += 1
            self._tried_at = self._steps
            self._plan(cost if cost and _without_plan(status) else None)
        # The first step makes what later ones only use: the second is the first to be recorded.
        wanted = self._tries < _TRIES or self._steps - self._tried_at >= _EVERY - 1
        self.wants_steps = wanted and (self.wants_steps or self._may_begin())

    def _may_begin(self) -> bool:
        """Return whether recording may begin: a rare step, such as a prompt's, begins it each time.

        The step after it goes by its plan, so nothing new would be learnt.
        """
        if self._begun >= _TRIES and self._steps - self._begun_at < _EVERY:
            return False
        self._begun, self._begun_at = self._begun + 1, self._steps
        return True

    def _judge(self, number: int, cost: Cost | None) -> None:
        """Judge a plan by a step that followed it; `cost` is known for recorded steps."""
        if cost is None or self._trials is None:
            return
        verdict = self._trials.judge(number, cost)
        if verdict is None:
            return
        if verdict.plan is None:
            core.roll_back_plan(number, self._number)
            _log.info(
                "plan %d%s is given up, and lru goes on in its steps: %s",
                number,
                self._here(),
                verdict.why,
            )
            return
        from ..policies.lowering import lower

        # Where its tensors are the plan knows.
        core.replace_plan(number, lower(verdict.plan, lambda _: 0), self._number)
        _log.info("plan %d%s goes on by another choice: %s", number, self._here(), verdict.why)

    def _compete(self, status: core.PlanStatus) -> None:
        """Let all plans change their choice where the program's steps vary."""
        contest = self._contest
        if contest is None:
            return
        cost = self._pace.read() if contest.running else None
        choice = contest.step_ended(
            status["complete"],
            cost,
            ops=status["hits"] + status["misses"],
            recording=self._recording.on,
        )
        if choice is None:
            return
        assert self._trials is not None
        self._trials.clear()
        for number in status["plans"]:
            if number not in self._plans:
                continue
            plans = self._plans[number]
            if contest.over and choice is Choice.NONE:
                core.roll_back_plan(number, self._number)
            else:
                core.replace_plan(number, plans.columns(choice), self._number)
        if contest.over:
            _log.info("steps vary, and go by %s from here on: %s", choice.value, contest.why())

    def _plan(self, without: Cost | None) -> None:
        """Plan the recorded step; `without` is what it cost if it went as by lru, else None."""
        from ..policies import lowering
        from ..policies.plan_check import check
        from ..trace.step_trace import Kind

        try:
            trace = self._recording.builder(self._number).step(cut=core.cut_sizes())
        except TraceError as error:  # such as a step without ops, as without torch
            self.not_planned(str(error), logging.INFO)
            return
        begin = time.perf_counter()
        device, budget = self._profile(), self._budget()
        addresses = self._recording.addresses(trace.source)
        recorded = self._recorded[0] = PlannedStep(trace, addresses, device, budget)
        trace = recorded.in_segments
        places = self._recording.addresses(trace.source)

        def address(tensor: TensorIndex) -> int:
            if trace.place is not None and trace.place[tensor] > 0:
                return int(trace.place[tensor])
            # What is carried into the next step is what this one made.
            if trace.kind[tensor] == Kind.CARRIED:
                tensor = TensorIndex(int(trace.next_alias[tensor]))
            return 0 if tensor < 0 else int(places[tensor])

        trace = replace(trace, exempt=_staying(trace, address))
        plan = self._policy.plan(trace, device, budget)
        if plan is None:
            self.plans = False
            return

        if not registry.is_built_in(self._policy):
            self._report_problems(check(plan))
        try:
            columns = lowering.lower(plan, address)
        except ValueError as error:
            self.not_planned(str(error))
            return
        number = core.install_plan(columns, self._number)
        kept = {0, number, *core.plan_status(self._number)["plans"]}
        self._recorded = {n: r for n, r in self._recorded.items() if n in kept} | {number: recorded}
        _log.info(
            "step %d planned by %s%s in %.0f ms: plan %d of %d ops, %d moves",
            self._steps, self._policy.name, self._here(), (time.perf_counter() - begin) * 1e3,
            number, trace.n_ops, len(plan.evict) + len(plan.evict_first) + len(plan.fetch),
        )  # fmt: skip
        self._layouts.planned(number, recorded.trace, budget)
        if self._trials is not None:
            second = getattr(self._policy, "second", None)
            spare = None if second is None else partial(second, trace, device, budget)
            self._try(number, _Choices(plan, spare), without, hides=device.hides_transfers)

    def _try(self, number: int, plans: _Choices, without: Cost | None, *, hides: bool) -> None:
        """Begin what tells whether the plan, its spare one or lru is best in its steps."""
        assert self._trials is not None
        kept = core.plan_status(self._number)["plans"]
        self._plans = {n: known for n, known in self._plans.items() if n in kept} | {number: plans}
        if self._contest is None:
            choices = [Choice.FIRST, *([Choice.SECOND] if plans.spare else []), Choice.NONE]
            self._contest = Contest(choices, hides_transfers=hides)
        if self._contest.running or self._contest.over:
            core.replace_plan(number, plans.columns(self._contest.choice), self._number)
        elif without is not None or not hides:
            self._trials.begin(number, without, plans.first, plans.spare, both=not hides)

    def _report_problems(self, problems: list[str]) -> None:
        """Name what of a plan has no effect; once, because the next plans are much the same."""
        if not problems or self._reported:
            return
        self._reported = True
        rest = len(problems) - _SHOWN
        lines = [*problems[:_SHOWN], *([f"and {rest} more"] if rest > 0 else [])]
        _log.warning(
            "the plan of policy %s has %d problem(s); umem.policies.check(plan) lists them:%s",
            self._policy.name, len(problems), "".join(f"\n  {line}" for line in lines),
        )  # fmt: skip


def _staying(trace: StepTrace, address: Callable[[TensorIndex], int]) -> Bools | None:
    """Find the pinned and excluded tensors among those alive at the step's end."""
    import numpy as np

    spans = [
        (address(TensorIndex(tensor)), int(size)) if large else (0, 0)
        for tensor, (size, large) in enumerate(zip(trace.bytes, trace.large, strict=True))
    ]
    staying = np.array(core.staying(spans), bool)
    return staying if staying.any() else None


def _without_plan(status: core.PlanStatus) -> bool:
    """Whether (nearly) all of the last step went as by lru."""
    return status["hits"] <= _FEW * (status["hits"] + status["misses"])
