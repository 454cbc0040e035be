"""The work at the end of each step: step planner, trace writer, follower of the free memory.

Native code calls `StepLoop.step_ended` then, and executes plans without Python.
"""

from __future__ import annotations

import errno
import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..base import current_device
from ..base.current_device import gpu_name
from ..base.native import core
from ..config import ranks
from ..config.options import BY_NAME
from ..config.settings import Settings, refusal
from .layout_driver import Layouts
from .step_planner import StepPlanner

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile
    from ..policies.base import Policy
    from ..trace.file_recorder import TraceFile
    from ..trace.schema import Header
    from .auto_budget import AutoBudget
    from .device_planner import PlannedStep

_log = logging.getLogger("umem")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, also for this user or process


class StepLoop:
    """The work at the end of each step: planner, trace writer, budget that follows free memory."""

    def __init__(
        self,
        planner: StepPlanner | None,
        file: TraceFile | None,
        follower: AutoBudget | None = None,
    ) -> None:
        self.planner, self.file, self.follower = planner, file, follower
        core.set_step_listener(self.step_ended)

    def step_ended(self) -> None:
        """Take the end of a step from native code, which hands on what interrupts the program."""
        if self.follower is not None and self.follower.step_ended():
            self.restart()
        if self.planner is not None:
            self.planner.step_ended()
        if self.file is not None:
            self.file.step_ended()

    def why_unplanned(self) -> str:
        """Say why steps had no plan; empty without a reason."""
        return self.planner.why_unplanned() if self.planner is not None else ""

    def planned_step(self, device: int) -> PlannedStep | None:
        """Return the step of a device that was planned last; None before one."""
        return self.planner.planned(device) if self.planner is not None else None

    def stop(self) -> None:
        """Before umem goes off."""
        core.set_step_listener(None)
        core.set_advisor(None)
        if self.planner is not None:
            self.planner.stop()
        if self.file is not None:
            self.file.close()

    def budget_changed(self) -> None:
        """Take the budget that the program set; stop following free memory."""
        self.follower = None
        self.restart()

    def follow_free_memory(self) -> None:
        """Look at it now."""
        if self.follower is not None and self.follower.look():
            self.restart()

    def restart(self) -> None:
        """Plans were for another budget, or for other tensors to stay."""
        if self.planner is not None:
            self.planner.restart()


def start(settings: Settings, policy: Policy | None) -> StepLoop | None:
    """Start what the settings ask for after umem was turned on; None if that is nothing.

    Raises:
        ConfigError: the trace's file cannot be written.
    """
    planner = None
    if policy is not None:
        planner = StepPlanner(policy, _device, _budget, partial(Layouts, settings.layout))
        if (victims := getattr(policy, "victims", None)) is not None:
            from ..policies.victim_callback import victim_callback

            core.set_advisor(victim_callback(victims))
    file = None if settings.trace is None else _open(settings, ranks.placed(settings.trace))
    follower = _follower(settings)
    return StepLoop(planner, file, follower) if planner or file or follower else None


def _follower(settings: Settings) -> AutoBudget | None:
    """None where the budget is fixed, or is the software device's only measure."""
    options = core.current_options()
    if not settings.budget.auto or (options.device == "soft" and not options.device_bytes):
        return None
    from . import auto_budget

    headroom = auto_budget.no_headroom if options.device == "soft" else core.headroom_bytes
    return auto_budget.AutoBudget(options.floor_bytes, headroom)


def _device(number: int) -> DeviceProfile:
    """Return the device to plan for."""
    hides = current_device.hides_transfers(number)
    return replace(current_device.profile(number), hides_transfers=hides)


def _budget(device: int) -> int:
    return core.stats(device)["budget_bytes"]


def _open(settings: Settings, path: Path) -> TraceFile | None:
    """Open the trace; on a full disk warn and return None, because only the trace needs the space.

    Raises:
        ConfigError: the file cannot be written for another reason.
    """
    from ..trace.file_recorder import TraceFile

    try:
        return TraceFile(path, _header)
    except OSError as error:
        if error.errno in _FULL:
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
    return Header(device=device, source=source)
