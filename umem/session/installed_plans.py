"""The plans of a device that native code follows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..base.native import core
from ..errors import ConfigError
from .plan_judge import Choice

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from ..policies.base import Plan
    from ..policies.lowering import Columns
    from ..trace.step_trace import StepTrace
    from .planned_step import PlannedStep

    SparePlan: TypeAlias = Callable[[], Plan | None]  # makes it, unless there is none


class _Installed(NamedTuple):
    step: PlannedStep
    trace: StepTrace  # as the policy got it
    plan: Plan
    spare: SparePlan | None
    choice: Choice = Choice.FIRST  # that its steps follow
    rolled_back: bool = False  # at some time, so that native code counted it

    def columns(self, choice: Choice) -> Columns:
        """Return what native code executes; it knows where the tensors are."""
        from ..policies.base import Plan
        from ..policies.lowering import lower

        plan = self.plan
        if choice is Choice.SECOND and self.spare is not None:
            plan = self.spare() or plan  # then lru comes next
        elif choice is Choice.NONE:
            plan = Plan(self.plan.trace, read_mostly=self.plan.read_mostly)
        return lower(plan, lambda _: 0)


class InstalledPlans:
    """The plans of a device by number, with what they were made from; native code drops the oldest.

    Args:
        device: the device's number.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._plans: dict[int, _Installed] = {}

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()  # first: `_change` takes a plan that is here for one of native code
        core.clear_plans(self._device)

    def install(
        self, columns: Columns, plan: Plan, spare: SparePlan | None, step: PlannedStep,
        trace: StepTrace,
    ) -> int:  # fmt: skip
        """Install a plan, which programs follow from now on; return its number.

        Args:
            columns: of the plan, with the addresses of its tensors.
            plan: of the step in segments.
            spare: makes another plan for the same steps; None if there is none.
            step: that the plan was made from.
            trace: the step as the policy got it.
        """
        number = core.install_plan(columns, self._device)
        kept = core.plan_status(self._device)["plans"]
        self._plans = {n: known for n, known in self._plans.items() if n in kept}
        self._plans[number] = _Installed(step, trace, plan, spare)
        return number

    def step_of(self, number: int) -> PlannedStep | None:
        """Return the recorded step that a plan was made from."""
        found = self._plans.get(number)
        return found and found.step

    def follow(self, choice: Choice, number: int | None, *, final: bool) -> None:
        """Let the steps of a plan follow a choice.

        Args:
            choice: what they follow.
            number: of the plan; None: all plans.
            final: the choice stays, at least until the plan is tried again. Native code counts
                plans that are dropped, once each.
        """
        present = core.plan_status(self._device)["plans"] if number is None else (number,)
        for plan in present:
            if (known := self._plans.get(plan)) is None:
                continue
            drops = final and choice is Choice.NONE and not known.rolled_back
            new = known._replace(choice=choice, rolled_back=known.rolled_back or drops)
            self._change(plan, known, new, None if drops else known.columns(choice))

    def followed(self, number: int) -> tuple[PlannedStep, StepTrace] | None:
        """Return a plan's step, also as the policy got it; None if its steps do not follow it."""
        found = self._plans.get(number)
        return (found.step, found.trace) if found and found.choice is Choice.FIRST else None

    def replace(self, number: int, plan: Plan, spare: SparePlan | None, step: PlannedStep) -> bool:
        """Replace a plan by another one for the same steps; return whether it was still there."""
        if (old := self._plans.get(number)) is None:
            return False
        made = old._replace(step=step, plan=plan, spare=spare)
        return self._change(number, old, made, made.columns(Choice.FIRST))

    def _change(
        self, number: int, old: _Installed, new: _Installed, columns: Columns | None
    ) -> bool:
        """Let native code execute other columns, or with None roll the plan back.

        Returns:
            False if another thread or a signal handler has dropped all plans meanwhile, as a new
            budget does.
        """
        try:
            if columns is None:
                core.roll_back_plan(number, self._device)
            else:
                core.replace_plan(number, columns, self._device)
        except ConfigError:
            if self._plans.get(number) is old:
                raise
        if self._plans.get(number) is not old:
            return False
        self._plans[number] = new
        return True
