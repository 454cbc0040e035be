"""Plans made while the program runs: a step is recorded, planned, and run by the plan from then on.

Each device that the program uses has plans of its own, from what the step does there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..base.native import core
from .device_planner import DevicePlanner
from .step_recording import StepRecording

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile
    from ..policies.base import Policy
    from .device_planner import PlannedStep
    from .layout_driver import Layouts

_log = logging.getLogger("umem")


class StepPlanner:
    """Plans the steps of a program with `policy`, on each device that it uses.

    Args:
        profile, budget: asked for the device of that number before a plan; the budget is in bytes.
        layouts: makes what gets the planned steps of a device.
    """

    def __init__(
        self,
        policy: Policy,
        profile: Callable[[int], DeviceProfile],
        budget: Callable[[int], int],
        layouts: Callable[[int], Layouts],
    ) -> None:
        self._policy, self._profile, self._budget, self._layouts = policy, profile, budget, layouts
        self._recording = StepRecording()
        self._planners: dict[int, DevicePlanner] = {}  # by device
        self._steps = 0
        self._off = False

    def step_ended(self) -> None:
        """Take the end of a step; log what the policy raises, and go on without plans.

        What interrupts the program is not the policy's: it is raised.
        """
        if self._off:
            return
        try:
            self._step()
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
        for planner in self._planners.values():
            planner.stop()

    def restart(self) -> None:
        """Forget all plans, because the budget is another one."""
        for planner in self._planners.values():
            planner.restart()

    def planned(self, device: int) -> PlannedStep | None:
        """Return the recorded step whose plan the device's last step went by, or else the last."""
        return self._planners[device].planned if device in self._planners else None

    def why_unplanned(self) -> str:
        """Say why steps had no plan: the most frequent reason; empty without one."""
        if self._steps == 0:
            return "no steps were seen, so nothing is planned: umem.step() marks the end of one"
        unplanned: Counter[str] = Counter()
        for planner in self._planners.values():
            unplanned.update(planner.unplanned)
        if not unplanned:
            return ""
        [(why, count)] = unplanned.most_common(1)
        return f"{count} recorded {'step has' if count == 1 else 'steps have'} no plan: {why}"

    def _step(self) -> None:
        self._steps += 1
        taken = self._recording.on and self._take()
        for device in core.opened_devices():
            if device not in self._planners:
                self._planners[device] = self._new_planner(device)
        for device, planner in self._planners.items():
            recorded = taken and planner.wants_steps
            if self._passed(device, taken=taken):
                planner.step_passed()
            else:
                planner.step_ended(recorded=recorded)
        if not all(planner.plans for planner in self._planners.values()):
            self.stop()
            return
        self._record(any(planner.wants_steps for planner in self._planners.values()))
        for planner in self._planners.values():
            planner.step_begins()

    def _passed(self, device: int, *, taken: bool) -> bool:
        """Return whether the last step is known to have used other devices only."""
        if len(self._planners) == 1:
            return False
        if taken:
            return device not in self._recording.used
        status = core.plan_status(device)  # without plans nothing is counted
        return bool(status["plans"]) and status["hits"] + status["misses"] == 0

    def _new_planner(self, device: int) -> DevicePlanner:
        return DevicePlanner(
            device,
            self._policy,
            partial(self._profile, device),
            partial(self._budget, device),
            layouts=self._layouts(device),
            recording=self._recording,
        )

    def _take(self) -> bool:
        """Return whether there is a recorded step."""
        if self._recording.take():
            return True
        for planner in self._planners.values():
            if planner.wants_steps:
                planner.not_planned("it has more events than are kept")
        self._record(False)
        return False

    def _record(self, on: bool) -> None:
        if not on:
            for planner in self._planners.values():
                planner.wants_steps = False
        if on == self._recording.on:
            return
        if on:
            self._recording.start()
        else:
            self._recording.stop()
