"""Plans of one device, made from its recorded steps.

The first steps that follow a plan are compared with steps without it, and its choice may change.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from ..base import current_device
from ..base.native import core
from ..errors import TraceError
from ..policies import registry
from .installed_plans import InstalledPlans
from .layouts import Layouts
from .meter import Meter
from .plan_judge import Choice, PlanJudge
from .planned_step import PlannedStep
from .recording_schedule import RecordingSchedule

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile
    from ..layout.layout import Layout
    from ..policies.base import Plan, Policy
    from ..trace.step_trace import StepTrace
    from .installed_plans import SparePlan
    from .meter import Cost
    from .plan_judge import Verdict
    from .step_recording import StepRecording

_log = logging.getLogger("umem")

_FEW = 0.1  # share of a step's ops that may follow a plan in a step that counts as one without
_OFF = 1.15  # ratio of a measured rate to that of a plan from which the plan is made again
_FIRST_LOOK = 4  # steps that follow a plan until its rates are compared; then 8, 16, ...


class DevicePlanner:
    """Plans steps with `policy` for a device until one follows a plan, and when one no longer does.

    A policy with `rollback` has each plan judged by its first steps. Steps whose plan is dropped
    run as under lru, and are not planned again.

    Args:
        number: the device's.
        policy: makes the plans.
        layouts: gets the steps that were planned.
        recording: has the steps of this device and of others.
    """

    def __init__(
        self, number: int, policy: Policy, layouts: Layouts, recording: StepRecording
    ) -> None:
        self._number, self._policy = number, policy
        self._layouts, self._recording = layouts, recording
        self.schedule = RecordingSchedule()
        self.makes_plans = True  # until the policy says otherwise
        self.unplanned: dict[str, int] = {}  # recorded steps without a plan, by the reason
        self._plans = InstalledPlans(number)
        self._judge: PlanJudge | None = None  # from the first plan on, if plans are judged
        self._meter = Meter(number)
        self._budget = core.stats(number)["budget_bytes"]  # that plans are for
        self._clears = 0  # how often all plans were dropped
        self._measured = False  # the cost of this step is known
        self._last = 0  # the plan that the step before followed
        self._recorded: PlannedStep | None = None  # the last one
        self._reported = False  # problems of a plan were logged
        self._spare_refused = False  # and that there is no spare plan
        self._followed: Counter[int] = Counter()  # steps, by the plan
        self._looks: set[int] = set()  # plans whose rates are due to be compared
        self._due: set[int] = set()  # plans that lost their resident layouts

    def stop(self) -> None:
        """Stop planning; lru decides what is evicted."""
        self.clear()
        self._layouts.stop()

    def restart(self) -> None:
        """Forget all plans, because the budget is another one."""
        self.clear()
        self._layouts.forget()
        self.schedule.restart()
        self._budget = core.stats(self._number)["budget_bytes"]

    def restart_at_end(self) -> None:
        """Restart for a new budget, at the end of a step that had another one."""
        self.restart()
        self._measured = False

    def clear(self) -> None:
        """Forget all plans."""
        self._clears += 1
        self._plans.clear()
        self._followed.clear()
        self._looks.clear()
        self._due.clear()
        self._judge = self._recorded = None

    @property
    def planned(self) -> PlannedStep | None:
        """The recorded step whose plan the last step followed, or else the last one."""
        return self._plans.step_of(self._last) or self._recorded

    def not_planned(self, why: str, level: int = logging.WARNING) -> None:
        """Count a recorded step without a plan; log each reason once where memory is short."""
        first = why not in self.unplanned
        self.unplanned[why] = self.unplanned.get(why, 0) + 1
        stats = core.stats(self._number)
        short = stats["peak_live_bytes"] > stats["budget_bytes"]
        _log.log(
            level if first and short else logging.INFO,
            "step not planned%s; falling back to LRU: %s",
            self._here(),
            why,
        )

    def _here(self) -> str:
        return f" on device {self._number}" if self._number else ""

    def step_begins(self) -> None:
        """Start to measure a step."""
        if self.schedule.wants_step or self._takes_turns:
            self._meter.start()
            self._measured = True

    @property
    def _takes_turns(self) -> bool:
        return (judge := self._judge) is not None and judge.takes_turns

    def step_ended(self, *, recorded: bool) -> None:
        """Take the end of a step that used the device.

        Args:
            recorded: whether the recording has the step.
        """
        if core.stats(self._number)["budget_bytes"] != self._budget:
            self.restart_at_end()  # torch.cuda.set_per_process_memory_fraction has no hook
        self.schedule.step_used()
        # Taking a recorded step waited for the device.
        wanted = self._measured and (recorded or self._takes_turns)
        cost = self._meter.read() if wanted else None
        status = core.plan_status(self._number)
        plan = status["complete"]
        if self._layouts.step_ended(plan):
            self._due.add(plan)
        alike = self._last in (0, plan) and self._layouts.settled(plan)
        self._last = plan
        if (judge := self._judge) is not None:
            self._judge_step(judge, status, cost, alike=alike)
        if plan:
            self._plan_without_layout(plan)
            self._follow_rates(plan)
            judge = self._judge
            testing = alike and judge is not None and judge.busy
            self.schedule.followed(plan, testing=testing)
            if judge is not None and judge.tries_again(plan):
                self.schedule.wants_step = True
        elif self.schedule.left(recorded=recorded and self._measured):
            self._plan(cost if cost and _without_plan(status) else None)

    def _plan_without_layout(self, plan: int) -> None:
        """Make a plan again that lost its resident layout, once its steps follow it."""
        found = self._plans.followed(plan)
        if plan not in self._due or found is None:
            return
        if (judge := self._judge) is not None and judge.compares(plan):
            return
        self._due.discard(plan)  # a handler may have set another budget
        self._plan_again(plan, *found)

    def _follow_rates(self, plan: int) -> None:
        """Make the plan again if the link is faster or slower than it was planned with.

        A policy of the program's own is asked once for each recorded step.
        """
        found = self._plans.followed(plan)
        if found is None or not registry.is_built_in(self._policy):
            return
        self._followed[plan] += 1
        steps = self._followed[plan]
        if steps >= _FIRST_LOOK and steps.bit_count() == 1:
            self._looks.add(plan)
        judge = self._judge
        if plan not in self._looks or (judge is not None and judge.compares(plan)):
            return
        self._looks.discard(plan)
        step, trace = found
        device = self._device()
        rates = [
            (step.device.bytes_per_us_in, device.bytes_per_us_in),
            (step.device.bytes_per_us_out, device.bytes_per_us_out),
        ]
        if not any(max(pair) > _OFF * min(pair) for pair in rates):
            return
        if self._plan_again(plan, replace(step, device=device), trace):
            _log.info(
                "plan %d%s made again: the link has %.1f GB/s in and %.1f out",
                plan, self._here(), device.bytes_per_us_in / 1e3, device.bytes_per_us_out / 1e3,
            )  # fmt: skip

    def _plan_again(self, plan: int, step: PlannedStep, trace: StepTrace) -> bool:
        """Make a plan again; return whether it replaces the old one."""
        clears = self._clears
        made, spare = self._made(trace, step, self._layouts.resident_of(plan))
        if made is None or self._clears != clears:
            return False
        return self._plans.replace(plan, made, spare, step)

    def _made(
        self, trace: StepTrace, step: PlannedStep, resident: Layout | None
    ) -> tuple[Plan | None, SparePlan | None]:
        """Return the policy's plan for the step as policies get it, and its spare plan's maker.

        Args:
            trace: the step with all tensors.
            step: the recorded step.
            resident: a layout whose memory is no part of the plan.
        """
        from ..policies.plan_check import as_plan

        device = current_device.for_plans(step.device)
        budget, moving = step.budget, trace
        if trace.peak_bytes > budget:
            budget -= min(core.room_ahead(self._number), budget)
        if resident is not None:
            budget, moving = budget - resident.bytes, resident.without(trace)

        def whole(plan: Plan) -> Plan:
            return plan if resident is None else replace(plan, trace=trace.pieces)

        def spare() -> Plan | None:
            made = self._second_choice(moving, device, budget)
            return made and whole(made)

        plan = as_plan(self._policy, self._policy.plan(moving, device, budget))
        return plan and whole(plan), spare if hasattr(self._policy, "second") else None

    def _second_choice(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan | None:
        """Return another plan of the policy; None if it has none that can be carried out."""
        from ..policies.plan_check import as_plan, check, out_of_range

        plan: Plan | None = None
        try:
            plan = as_plan(self._policy, self._policy.second(trace, device, budget))  # type: ignore[attr-defined]
            why = "it is None" if plan is None else out_of_range(plan)
        except BaseException as error:
            if core.is_interrupt(error):
                raise
            why = f"{type(error).__name__}: {error}"
        if plan is not None and why is None:
            if not registry.is_built_in(self._policy):
                self._report_problems(check(plan))
            return plan
        if not self._spare_refused:
            _log.warning("policy %s has no second choice: %s", self._policy.name, why)
        self._spare_refused = True
        return None

    def _device(self) -> DeviceProfile:
        profile = current_device.profile(self._number)
        return replace(profile, hides_transfers=current_device.hides_transfers(self._number))

    def _judge_step(
        self, judge: PlanJudge, status: core.PlanStatus, cost: Cost | None, *, alike: bool
    ) -> None:
        verdict = judge.step_ended(
            status["complete"],
            cost,
            ops=status["hits"] + status["misses"],
            recording=self._recording.on,
            alike=alike,
        )
        if verdict is None:
            return
        self._plans.follow(verdict.choice, verdict.plan, final=bool(verdict.why))
        if verdict.why:
            if verdict.choice is Choice.NONE:  # lru has the budget alone
                self._due.update(self._layouts.give_up(verdict.plan))
            self._log_verdict(verdict)

    def _log_verdict(self, verdict: Verdict) -> None:
        choice, plan, why = verdict
        if plan is None:
            _log.info("steps vary and follow %s from now on: %s", choice.value, why)
        elif choice is Choice.NONE:
            text = "plan %d%s dropped; its steps fall back to lru: %s"
            _log.info(text, plan, self._here(), why)
        elif choice is Choice.SECOND:
            _log.info("plan %d%s replaced by its second choice: %s", plan, self._here(), why)
        else:
            _log.info("plan %d%s is followed again: %s", plan, self._here(), why)

    def _plan(self, without: Cost | None) -> None:
        """Plan the recorded step; `without` is its cost if it followed no plan, else None."""
        from ..policies import lowering
        from ..policies.plan_check import check

        begin = time.perf_counter()
        recorded = self._recorded_step()
        if recorded is None:
            return
        clears, self._recorded = self._clears, recorded
        trace, places = recorded.for_policy(self._recording)
        resident = None
        if self._policy.name == registry.DEFAULT:  # another one may want to move any tensor
            device = current_device.for_plans(recorded.device)
            resident = self._layouts.resident(trace, recorded.budget, device)
        plan, spare = self._made(trace, recorded, resident)
        if plan is None:
            self.makes_plans = False
            return
        if not registry.is_built_in(self._policy):
            self._report_problems(check(plan))
        try:
            columns = lowering.lower(plan, places.__getitem__)
        except lowering.NothingToPlanError as error:
            self.not_planned(str(error))
            return
        number = self._plans.install(columns, plan, spare, recorded, trace)
        if self._clears != clears:  # a signal handler changed the budget, or turned umem off
            self._plans.clear()
            return
        _log.info(
            "step %d planned by %s%s in %.0f ms: plan %d of %d ops, %d moves",
            self.schedule.steps, self._policy.name, self._here(),
            (time.perf_counter() - begin) * 1e3, number, trace.n_ops,
            len(plan.evict) + len(plan.evict_first) + len(plan.fetch),
        )  # fmt: skip
        self._layouts.planned(number, recorded.trace, recorded.budget, resident)
        if getattr(self._policy, "rollback", False):
            self._begin_trial(number, without, recorded.device, spare)

    def _recorded_step(self) -> PlannedStep | None:
        """Return the step that was recorded; None if it cannot be planned."""
        try:
            trace = self._recording.builder(self._number).step(cut=core.cut_sizes())
        except TraceError as error:  # such as a step without ops, as without torch
            self.not_planned(str(error), logging.INFO)
            return None
        budget = core.stats(self._number)["budget_bytes"]
        return PlannedStep(trace, self._recording.addresses(trace.source), self._device(), budget)

    def _begin_trial(
        self,
        number: int,
        without: Cost | None,
        device: DeviceProfile,
        spare: SparePlan | None,
    ) -> None:
        """Begin to compare the plan, its spare plan and lru in its steps."""
        if (judge := self._judge) is None:
            choices = [Choice.FIRST, *([Choice.SECOND] if spare else []), Choice.NONE]
            judge = self._judge = PlanJudge(choices, hides_transfers=device.hides_transfers)
        choice = judge.begin(number, without)
        if choice is not None:
            self._plans.follow(choice, number, final=False)

    def _report_problems(self, problems: list[str]) -> None:
        """Log entries of a plan without effect; once, because later plans are much the same."""
        if not problems or self._reported:
            return
        self._reported = True
        from ..policies.plan_check import summary

        _log.warning("%s", summary(self._policy, problems))


def _without_plan(status: core.PlanStatus) -> bool:
    """Return whether the last step followed no plan, or hardly any of one."""
    return status["hits"] <= _FEW * (status["hits"] + status["misses"])
