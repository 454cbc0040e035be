"""The plans of a device that native code follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..base.native import core
from .plan_judge import Choice

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile
    from ..policies.base import Plan, Policy
    from ..policies.lowering import Columns
    from .planned_step import PlannedStep


class _Installed(NamedTuple):
    step: PlannedStep
    plan: Plan
    spare: Callable[[], Plan] | None
    choice: Choice = Choice.FIRST  # that its steps follow

    def columns(self, choice: Choice) -> Columns:
        """Return what native code executes; it knows where the tensors are."""
        from ..policies.base import Plan
        from ..policies.lowering import lower

        plan = self.plan
        if choice is Choice.SECOND and self.spare is not None:
            plan = self.spare()
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
        core.clear_plans(self._device)
        self._plans.clear()

    def install(
        self, columns: Columns, plan: Plan, spare: Callable[[], Plan] | None, step: PlannedStep
    ) -> int:
        """Install a plan, which programs follow from now on; return its number.

        Args:
            columns: of the plan, with the addresses of its tensors.
            plan: of the step in segments.
            spare: makes another plan for the same steps; None if there is none.
            step: that the plan was made from.
        """
        number = core.install_plan(columns, self._device)
        kept = core.plan_status(self._device)["plans"]
        self._plans = {n: known for n, known in self._plans.items() if n in kept}
        self._plans[number] = _Installed(step, plan, spare)
        return number

    def step_of(self, number: int) -> PlannedStep | None:
        """Return the recorded step that a plan was made from."""
        return self._plans[number].step if number in self._plans else None

    def follow(self, choice: Choice, number: int | None, *, final: bool) -> None:
        """Let the steps of a plan follow a choice.

        Args:
            choice: what they follow.
            number: of the plan; None: all plans.
            final: the choice stays. Native code counts plans that are dropped for good.
        """
        present = core.plan_status(self._device)["plans"] if number is None else (number,)
        for plan in present:
            if plan not in self._plans:
                continue
            if final and choice is Choice.NONE:
                core.roll_back_plan(plan, self._device)
            else:
                core.replace_plan(plan, self._plans[plan].columns(choice), self._device)
            self._plans[plan] = self._plans[plan]._replace(choice=choice)

    def make_again(self, number: int, policy: Policy, device: DeviceProfile) -> bool:
        """Plan a plan's step with another device's figures; False if it follows another choice."""
        found = self._plans.get(number)
        if found is None or found.choice is not Choice.FIRST:
            return False
        plan = policy.plan(found.plan.trace, device, found.step.budget)
        if plan is None:
            return False
        self._plans[number] = found._replace(step=found.step._replace(device=device), plan=plan)
        core.replace_plan(number, self._plans[number].columns(Choice.FIRST), self._device)
        return True
