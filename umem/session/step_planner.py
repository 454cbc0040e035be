"""The work at the end of each step: plans, the trace file, the budget that follows free memory.

Native code calls `StepPlanner.step_ended` there, and executes plans without Python. Each device
that the program uses has its own plans, made from the part of the step that runs there.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.current_device import gpu_name
from ..base.native import core
from ..base.untraced import untraced
from ..config import ranks
from ..config.options import BY_NAME
from ..config.settings import Settings, refusal, trace_most
from ..policies import registry
from .device_planner import DevicePlanner
from .layouts import Layouts
from .step_recording import StepRecording

if TYPE_CHECKING:
    from ..policies.base import Policy
    from ..trace.file_recorder import TraceFile
    from ..trace.schema import Header
    from .auto_budget import AutoBudget
    from .planned_step import PlannedStep

_log = logging.getLogger("umem")

# No space, also for this user or process; and the file belongs to another process.
_NO_TRACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBUSY)


class StepPlanner:
    """Plans the steps of a program: a step is recorded, planned, and follows the plan from then on.

    Args:
        policy: plans steps on each device that the program uses; None: there are no plans.
        layout: the option `layout`.
        file: gets the trace of all steps.
        follower: the budget that follows free memory.
    """

    def __init__(
        self,
        policy: Policy | None,
        layout: str,
        file: TraceFile | None = None,
        follower: AutoBudget | None = None,
    ) -> None:
        self._policy, self._layout, self._file, self._follower = policy, layout, file, follower
        self._recording = StepRecording()
        self._planners: dict[int, DevicePlanner] = {}  # by device
        self._steps = 0
        self._off = policy is None
        self._ended = ""  # why nothing is planned any more
        self._busy = False  # at the end of a step
        core.set_step_listener(untraced(self.step_ended))

    def step_ended(self) -> None:
        """Take the end of a step from native code, which passes interrupts on to the program.

        A signal handler or a destructor may end another step meanwhile, which becomes a part of the
        next one, or turn umem off.
        """
        if self._busy:
            return
        self._busy = True
        try:
            if self._follower is not None and self._follower.step_ended():
                for planner in self._planners.values():
                    planner.restart_at_end()
            if not self._off:
                self._plan()
            if self._file is not None:
                self._file.step_ended()
        finally:
            self._busy = False

    def stop(self) -> None:
        """Stop all of it, before umem is turned off."""
        core.set_step_listener(None)
        core.set_advisor(None)
        self._plan_no_more()
        file, self._file, self._follower = self._file, None, None
        if file is not None:
            file.close()

    def restart(self) -> None:
        """Forget all plans: the budget changed, or the tensors that have to stay."""
        for planner in self._planners.values():
            planner.restart()

    def budget_changed(self) -> None:
        """Take the budget that the program set; stop following free memory."""
        self._follower = None
        self.restart()

    def follow_free_memory(self) -> None:
        """Check the free memory now."""
        if self._follower is not None and self._follower.look():
            self.restart()

    def planned_step(self, device: int) -> PlannedStep | None:
        """Return the recorded step whose plan the device's last step followed, or else the last.

        None before one.
        """
        return self._planners[device].planned if device in self._planners else None

    def why_unplanned(self) -> str:
        """Return why steps had no plan: why planning ended, or else the most frequent reason.

        Empty without one.
        """
        if self._policy is None:
            return ""
        if self._ended:
            return self._ended
        if self._steps == 0:
            return "no steps were seen, so nothing is planned: umem.step() marks the end of one"
        unplanned: Counter[str] = Counter()
        for planner in self._planners.values():
            unplanned.update(planner.unplanned)
        if not unplanned:
            return ""
        [(why, count)] = unplanned.most_common(1)
        return f"{count} recorded {'step has' if count == 1 else 'steps have'} no plan: {why}"

    def _plan(self) -> None:
        """Plan after a step; log an error of the policy, and continue without plans.

        An interrupt is not an error of the policy: it is raised.
        """
        assert self._policy is not None
        try:
            self._step(self._policy)
        except BaseException as error:
            if core.is_interrupt(error):
                self._record(False)  # it may be incomplete; the next step begins another
                raise
            if self._off:  # turned off meanwhile
                return
            name, kind = self._policy.name, type(error).__name__
            _log.warning(
                "policy %s raised %s; falling back to lru: %s", name, kind, error, exc_info=error
            )
            self._ended = f"policy {name} raised {kind}: {error}; lru since step {self._steps}"
            core.set_advisor(None)
            self._plan_no_more()

    def _plan_no_more(self) -> None:
        """Stop recording and planning; lru decides what is evicted."""
        self._off = True
        self._record(False)
        for planner in self._planners.values():
            planner.stop()

    def _step(self, policy: Policy) -> None:
        self._steps += 1
        taken = self._recording.on and self._take()
        for device in core.opened_devices():
            if device not in self._planners:
                layouts = Layouts(self._layout, device)
                self._planners[device] = DevicePlanner(device, policy, layouts, self._recording)
        planners = self._planners.values()
        for device, planner in self._planners.items():
            recorded = taken and planner.schedule.wants_step
            if self._passed(device, taken=taken):
                planner.schedule.step_passed()
            else:
                planner.step_ended(recorded=recorded)
        if self._off:  # a signal handler turned umem off meanwhile
            return
        if not all(planner.makes_plans for planner in planners):
            self._plan_no_more()
            if not registry.is_built_in(policy) and not hasattr(policy, "victims"):
                self._ended = f"policy {policy.name} returned no plan; lru decides from now on"
                _log.warning("%s", self._ended)
            return
        self._record(any(planner.schedule.wants_step for planner in planners))
        for planner in planners:
            planner.step_begins()

    def _passed(self, device: int, *, taken: bool) -> bool:
        """Return whether the last step is known not to have used the device."""
        if taken:
            # A program whose steps have no ops at all is told so.
            known = len(self._planners) > 1 or self._recording.builder(device).steps > 0
            return known and device not in self._recording.used
        status = core.plan_status(device)  # counts nothing without plans
        return bool(status["plans"]) and status["hits"] + status["misses"] == 0

    def _take(self) -> bool:
        """Return whether there is a recorded step."""
        if self._recording.take():
            return True
        for planner in self._planners.values():
            if planner.schedule.wants_step:
                planner.not_planned("it has more events than are kept")
        self._record(False)
        return False

    def _record(self, on: bool) -> None:
        if not on:
            for planner in self._planners.values():
                planner.schedule.wants_step = False
        if on == self._recording.on or (on and self._off):
            return
        if on:
            self._recording.start()
        else:
            self._recording.stop()


def start(settings: Settings, policy: Policy | None) -> StepPlanner | None:
    """Start the work that the settings ask for after umem was turned on; None if there is none.

    Raises:
        ConfigError: the trace's file cannot be written.
    """
    file = None if settings.trace is None else _open(settings, ranks.placed(settings.trace))
    follower = _follower(settings)
    if policy is None and file is None and follower is None:
        return None
    if policy is not None and (victims := getattr(policy, "victims", None)) is not None:
        from ..policies.victim_callback import victim_callback

        # `StepPlanner.stop` takes it back.
        core.set_advisor(untraced(victim_callback(victims, policy.name)))
    return StepPlanner(policy, settings.layout, file, follower)


def _follower(settings: Settings) -> AutoBudget | None:
    """Return None if the budget is fixed, or the only limit of the software device."""
    options = core.current_options()
    if not settings.budget.auto or (options.device == "soft" and not options.device_bytes):
        return None
    from . import auto_budget

    headroom = auto_budget.no_headroom if options.device == "soft" else core.headroom_bytes
    return auto_budget.AutoBudget(options.floor_bytes, headroom)


def _open(settings: Settings, path: Path) -> TraceFile | None:
    """Open the trace; if the disk is full or the file is another's, warn and return None.

    The program needs no trace, so it continues.

    Raises:
        ConfigError: the file cannot be written for another reason.
    """
    from ..trace.file_recorder import TraceFile

    try:
        of_variable = settings.origins["trace"] == BY_NAME["trace"].env
        return TraceFile(path, _header, trace_most() if of_variable else 0)
    except OSError as error:
        if error.errno in _NO_TRACE:
            _log.warning("the trace %s is not written: %s", path, error.strerror)
            return None
        origin, reason = settings.origins["trace"], f"{path}: {error.strerror or error}"
        allowed = "a file in a directory that can be written"
        raise refusal(BY_NAME["trace"], origin, reason, allowed) from None


def _header() -> Header:
    from ..trace.schema import Header

    options = core.current_options()
    device = options.profile if options.device == "soft" else gpu_name()
    torch = sys.modules.get("torch")
    source = "a program without torch" if torch is None else f"torch {torch.__version__}"
    limits = {}
    for number in core.opened_devices()[:1]:  # a budget is of one device
        figures = core.stats(number)
        limits = {name: figures[f"{name}_bytes"] for name in ("budget", "host_budget")}
    if limits and options.staging_bytes:
        limits["staging"] = options.staging_bytes
    return Header(device=device, source=source, extra=limits or None)
