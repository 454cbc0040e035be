"""Plans made while the program runs: a step is recorded, planned, and run by the plan from then on.

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
from ..trace.ids import Address, BlockId, TensorIndex
from . import plan_guard
from .contest import Choice, Contest
from .layout_driver import Layouts
from .plan_guard import Cost, Meter, PlanGuard

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile
    from ..policies.base import Plan, Policy
    from ..policies.lowering import Columns
    from ..trace.step_builder import StepBuilder
    from ..trace.step_trace import Bools, Ints, StepTrace
    from .plan_guard import Spare

_log = logging.getLogger("umem")

# Steps in a row that went by a plan, after which no more are recorded: as many as are tried.
_SETTLED = plan_guard.STEPS_OF_FIRST + plan_guard.STEPS
_TRIES = 16  # plans before steps in a row went by some, after which only
_EVERY = 100  # one step in so many is planned
_FEW = 0.1  # share of a step's ops that may go by a plan in a step that counts as one without
_SHOWN = 3  # problems of a plan that are logged
_NO_BLOCK = BlockId((1 << 62) - 1)  # an id that no block has


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


class StepPlanner:
    """Plans steps with `policy` for `device` until one goes by a plan, and when one no longer does.

    A policy with `rollback` has each plan given up whose first steps move more and take longer than
    the recorded one. Steps like that go on as by lru, and are not planned again.

    Args:
        device, budget: asked before a plan; what device it is may not be known before its use.
        budget: in bytes.
        layouts: gets the steps that were planned.
    """

    def __init__(
        self,
        policy: Policy,
        device: Callable[[], DeviceProfile],
        budget: Callable[[], int],
        layouts: Layouts,
    ) -> None:
        self._policy, self._device, self._budget = policy, device, budget
        self._layouts = layouts
        self._builder: StepBuilder | None = None  # while steps are recorded
        self._addresses: dict[BlockId, Address] = {}
        self._freed: list[BlockId] = []  # in the last step, whose addresses are not needed any more
        self._steps = self._tries = self._settled = self._tried_at = 0
        self._trials = PlanGuard() if getattr(policy, "rollback", False) else None
        self._meter = Meter()
        self._plans: dict[int, _Choices] = {}  # by number, where there is more than one choice
        self._contest: Contest | None = None
        self._pace = Meter()
        self._begun = self._begun_at = 0  # how often, and when last, recording began
        self._last = 0  # the plan that the step before went by
        self._off = self._reported = False
        self._unplanned: dict[str, int] = {}  # recorded steps without a plan, by the reason
        self._recorded: dict[int, PlannedStep] = {}  # by plan; 0: the last one

    def step_ended(self) -> None:
        """Take the end of a step; log what the policy raises, and go on without plans.

        What interrupts the program is not the policy's: it is raised.
        """
        if self._off:
            return
        try:
            self._step()
            if self._builder is not None:
                self._meter.start()
            if self._contest is not None and self._contest.running:
                self._pace.start()
        except BaseException as error:
            if core.is_interrupt(error):
                self._record(False)  # which may lack what it was at; the next step begins another
                raise
            _log.warning(
                "policy %s raised %s; falling back to lru: %s",
                self._policy.name, type(error).__name__, error, exc_info=error,
            )  # fmt: skip
            core.set_advisor(None)
            self.stop()

    def stop(self) -> None:
        """Record and plan no more; what is evicted is decided as by lru."""
        self._off = True
        self._record(False)
        self._clear()
        self._layouts.stop()

    def restart(self) -> None:
        """Forget all plans, because the budget is another one."""
        self._clear()
        self._tries = self._settled = self._begun = 0

    def _clear(self) -> None:
        core.clear_plans()
        if self._trials is not None:
            self._trials.clear()
        self._plans.clear()
        self._recorded.clear()
        self._contest = None

    @property
    def planned(self) -> PlannedStep | None:
        """The recorded step whose plan the last step went by, or else the last one."""
        return self._recorded.get(self._last) or self._recorded.get(0)

    def why_unplanned(self) -> str:
        """Say why steps had no plan: the most frequent reason; empty without one."""
        if self._steps == 0:
            return "no steps were seen, so nothing is planned: umem.step() marks the end of one"
        if not self._unplanned:
            return ""
        why, count = max(self._unplanned.items(), key=lambda item: item[1])
        return f"{count} recorded {'step has' if count == 1 else 'steps have'} no plan: {why}"

    def _not_planned(self, why: str, level: int = logging.WARNING) -> None:
        """Count a recorded step without a plan; say each reason once where memory is short."""
        first = why not in self._unplanned
        self._unplanned[why] = self._unplanned.get(why, 0) + 1
        stats = core.stats()
        short = stats["peak_live_bytes"] > stats["budget_bytes"]
        _log.log(
            level if first and short else logging.INFO,
            "the step is not planned, and goes as by lru: %s",
            why,
        )

    def _step(self) -> None:
        self._steps += 1
        recorded = self._take()
        cost = self._meter.read() if recorded else None  # taking it waited for the device
        status = core.plan_status()
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
                self._record(False)
            return
        self._settled = self._last = 0
        resting = self._tries >= _TRIES and self._steps - self._tried_at < _EVERY
        if recorded and not resting:
            self._tries += 1
            self._tried_at = self._steps
            self._plan(cost if cost and _without_plan(status) else None)
        # The first step makes what later ones only use: the second is the first to be recorded.
        wanted = self._tries < _TRIES or self._steps - self._tried_at >= _EVERY - 1
        self._record(wanted and (self._builder is not None or self._may_begin()))

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
            core.roll_back_plan(number)
            _log.info("plan %d is given up, and lru goes on in its steps: %s", number, verdict.why)
            return
        from ..policies.lowering import lower

        # Where its tensors are the plan knows.
        core.replace_plan(number, lower(verdict.plan, lambda _: 0))
        _log.info("plan %d goes on by another choice: %s", number, verdict.why)

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
            recording=self._builder is not None,
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
                core.roll_back_plan(number)
            else:
                core.replace_plan(number, plans.columns(choice))
        if contest.over:
            _log.info("steps vary, and go by %s from here on: %s", choice.value, contest.why())

    def _record(self, on: bool) -> None:
        if on == (self._builder is not None):
            return
        if not on:
            core.record_stop("plan")
            self._builder = None
            self._addresses.clear()
            self._freed.clear()
            return
        from ..trace.step_builder import StepBuilder

        core.record_start("plan")
        self._builder = StepBuilder()

    def _take(self) -> bool:
        """Whether there is a recorded step."""
        if self._builder is None:
            return False
        from ..trace import native_columns
        from ..trace.schema import Free

        recorded: core.Recorded = core.record_take("plan")
        if recorded["dropped"]:
            self._not_planned("it has more events than are kept")
            self._record(False)
            return False
        for block in self._freed:
            self._addresses.pop(block, None)
        self._freed.clear()
        self._addresses.update(native_columns.addresses(recorded))
        for i, event in enumerate(native_columns.events(recorded)):
            if i == recorded["before"] > 0:
                self._begin()
            self._builder.add(event)
            if type(event) is Free:
                self._freed.append(event.id)
        return True

    def _begin(self) -> None:
        """Start the recording; blocks alive before it are no part of the first step."""
        from ..trace.schema import Alloc, Free, Step

        assert self._builder is not None
        for event in (Step(), Alloc(_NO_BLOCK, 1), Free(_NO_BLOCK), Step()):
            self._builder.add(event)

    def _plan(self, without: Cost | None) -> None:
        """Plan the recorded step; `without` is what it cost if it went as by lru, else None."""
        import numpy as np

        from ..policies import lowering
        from ..policies.plan_check import check
        from ..trace.segments import with_segments
        from ..trace.step_trace import Kind

        assert self._builder is not None
        try:
            trace = self._builder.step(cut=core.cut_sizes())
        except TraceError as error:  # such as a step without ops, as without torch
            self._not_planned(str(error), logging.INFO)
            return
        begin = time.perf_counter()
        places = [self._addresses.get(BlockId(block), 0) for block in trace.source.tolist()]
        found = np.array(places, np.int64)
        whole, trace = trace, with_segments(trace, found)

        def address(tensor: TensorIndex) -> int:
            if trace.place is not None and trace.place[tensor] > 0:
                return int(trace.place[tensor])
            # What is carried into the next step is what this one made.
            if trace.kind[tensor] == Kind.CARRIED:
                tensor = TensorIndex(int(trace.next_alias[tensor]))
            return 0 if tensor < 0 else self._addresses.get(trace.block_of(tensor), 0)

        trace = replace(trace, exempt=_staying(trace, address))
        device, budget = self._device(), self._budget()
        recorded = self._recorded[0] = PlannedStep(whole, found, device, budget)
        plan = self._policy.plan(trace, device, budget)
        if plan is None:
            self.stop()
            return

        if not registry.is_built_in(self._policy):
            self._report_problems(check(plan))
        try:
            columns = lowering.lower(plan, address)
        except ValueError as error:
            self._not_planned(str(error))
            return
        number = core.install_plan(columns)
        kept = {0, number, *core.plan_status()["plans"]}
        self._recorded = {n: r for n, r in self._recorded.items() if n in kept} | {number: recorded}
        _log.info(
            "step %d planned by %s in %.0f ms: plan %d of %d ops, %d moves",
            self._steps, self._policy.name, (time.perf_counter() - begin) * 1e3, number,
            trace.n_ops, len(plan.evict) + len(plan.evict_first) + len(plan.fetch),
        )  # fmt: skip
        self._layouts.planned(number, whole, budget)
        if self._trials is not None:
            second = getattr(self._policy, "second", None)
            spare = None if second is None else partial(second, trace, device, budget)
            self._try(number, _Choices(plan, spare), without, hides=device.hides_transfers)

    def _try(self, number: int, plans: _Choices, without: Cost | None, *, hides: bool) -> None:
        """Begin what tells whether the plan, its spare one or lru is best in its steps."""
        assert self._trials is not None
        kept = core.plan_status()["plans"]
        self._plans = {n: known for n, known in self._plans.items() if n in kept} | {number: plans}
        if self._contest is None:
            choices = [Choice.FIRST, *([Choice.SECOND] if plans.spare else []), Choice.NONE]
            self._contest = Contest(choices, hides_transfers=hides)
        if self._contest.running or self._contest.over:
            core.replace_plan(number, plans.columns(self._contest.choice))
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
