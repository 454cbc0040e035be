"""Plans made while the program runs: a step is recorded, planned, and run by the plan from then on.

Native code calls `Driver.step_ended` at the end of each step, and executes plans without Python.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import config, devices
from .autolayout import Layouts
from .config import Settings
from .errors import TraceError
from .native import core
from .options import BY_NAME
from .policies import registry
from .trial import Cost, Meter, Trials

if TYPE_CHECKING:
    from ._core import PlanStatus, Recorded
    from .devices import DeviceProfile
    from .policies.base import Policy
    from .pressure import Follower
    from .trace.recording import TraceFile
    from .trace.schema import Header
    from .trace.step import Bools, StepTrace
    from .trace.steps import StepBuilder

_log = logging.getLogger("umem")

_SETTLED = 4  # steps in a row that went by a plan, after which no more are recorded
_TRIES = 16  # plans in a row that no step went by, after which only
_EVERY = 100  # one step in so many is planned
_FEW = 0.1  # share of a step's ops that may go by a plan in a step that counts as one without
_GPU_DEFAULT = "h200-pcie5"
_NO_BLOCK = (1 << 62) - 1  # an id that no block has


class Planner:
    """Plans steps with `policy` for `device` until one goes by a plan, and when one no longer does.

    A policy with `on_trial` has each plan given up whose first steps move more and take longer than
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
        self._addresses: dict[int, int] = {}
        self._steps = self._tries = self._settled = self._tried_at = 0
        self._trials = Trials() if getattr(policy, "on_trial", False) else None
        self._meter = Meter()
        self._off = False

    def step_ended(self) -> None:
        """A step ended. What the policy raises is logged, and umem goes on without plans."""
        if self._off:
            return
        try:
            self._step()
            if self._builder is not None:
                self._meter.start()
        except Exception as error:  # noqa: BLE001 - a policy may be anybody's
            _log.warning(
                "the policy %s failed and lru goes on: %s: %s",
                self._policy.name, type(error).__name__, error,
            )  # fmt: skip
            core.set_advisor(None)
            self.stop()

    def stop(self) -> None:
        """Record and plan no more; what is evicted is decided as by lru."""
        self._off = True
        self._record(False)
        core.clear_plans()
        self._layouts.stop()

    def restart(self) -> None:
        """Forget all plans, because the budget is another one."""
        core.clear_plans()
        if self._trials is not None:
            self._trials.clear()
        self._tries = self._settled = 0

    def _step(self) -> None:
        self._steps += 1
        recorded = self._take()
        cost = self._meter.read() if recorded else None  # taking it waited for the device
        status = core.plan_status()
        self._layouts.step_ended(status["complete"])
        if status["complete"]:
            self._judge(status["complete"], cost)
            self._tries = 0
            self._settled += 1
            if self._settled >= _SETTLED:
                self._record(False)
            return
        self._settled = 0
        resting = self._tries >= _TRIES and self._steps - self._tried_at < _EVERY
        if recorded and not resting:
            self._tries += 1
            self._tried_at = self._steps
            number = self._plan()
            if number and cost and self._trials is not None and _without_plan(status):
                self._trials.begin(number, cost)
        # The first step makes what later ones only use: the second is the first to be recorded.
        self._record(self._tries < _TRIES or self._steps - self._tried_at >= _EVERY - 1)

    def _judge(self, number: int, cost: Cost | None) -> None:
        """A step went by the plan; `cost` is known of recorded ones."""
        if cost is None or self._trials is None:
            return
        why = self._trials.failed(number, cost)
        if why is None:
            return
        core.retract_plan(number)
        _log.info("plan %d is given up, and lru goes on in its steps: %s", number, why)

    def _record(self, on: bool) -> None:
        if on == (self._builder is not None):
            return
        if not on:
            core.record_stop("plan")
            self._builder = None
            self._addresses.clear()
            return
        from .trace.steps import StepBuilder

        core.record_start("plan")
        self._builder = StepBuilder()

    def _take(self) -> bool:
        """Whether there is a recorded step."""
        if self._builder is None:
            return False
        from .trace import live
        from .trace.schema import Free

        recorded: Recorded = core.record_take("plan")
        if recorded["dropped"]:
            _log.info("a step of more events than are kept is not planned")
            self._record(False)
            return False
        self._addresses.update(live.addresses(recorded))
        for i, event in enumerate(live.events(recorded)):
            if i == recorded["before"] > 0:
                self._begin()
            self._builder.add(event)
            if type(event) is Free:
                self._addresses.pop(event.id, None)
        return True

    def _begin(self) -> None:
        """What was alive before the first recorded step is no part of it, nor of the one before."""
        from .trace.schema import Alloc, Free, Step

        assert self._builder is not None
        for event in (Step(), Alloc(_NO_BLOCK, 1), Free(_NO_BLOCK), Step()):
            self._builder.add(event)

    def _plan(self) -> int:
        """The number of the plan for the recorded step; 0: none."""
        from .policies import lowering
        from .trace.step import Kind

        assert self._builder is not None
        try:
            trace = self._builder.step()
        except TraceError as error:
            _log.info("the step is not planned: %s", error)
            return 0
        if not trace.large.any():
            return 0  # nothing that could be moved alone
        begin = time.perf_counter()

        def address(tensor: int) -> int:
            # What is carried into the next step is what this one made.
            if trace.kind[tensor] == Kind.CARRIED:
                tensor = int(trace.twin[tensor])
            return 0 if tensor < 0 else self._addresses.get(int(trace.source[tensor]), 0)

        trace = replace(trace, stays=_staying(trace, address))
        plan = self._policy.plan(trace, self._device(), self._budget())
        if plan is None:
            self.stop()
            return 0

        try:
            columns = lowering.lower(plan, address)
        except ValueError as error:
            _log.info("the step is not planned: %s", error)
            return 0
        number = core.install_plan(columns)
        _log.info(
            "step %d planned by %s in %.0f ms: plan %d of %d ops, %d moves",
            self._steps, self._policy.name, (time.perf_counter() - begin) * 1e3, number,
            trace.n_ops, len(plan.evict) + len(plan.cold) + len(plan.fetch),
        )  # fmt: skip
        self._layouts.planned(number, trace, self._budget())
        return number


def _staying(trace: StepTrace, address: Callable[[int], int]) -> Bools | None:
    """What of the step the program has pinned or excluded, as far as it is alive where it ends."""
    import numpy as np

    spans = [
        (address(tensor), int(size)) if large else (0, 0)
        for tensor, (size, large) in enumerate(zip(trace.bytes, trace.large, strict=True))
    ]
    staying = np.array(core.staying(spans), bool)
    return staying if staying.any() else None


def _without_plan(status: PlanStatus) -> bool:
    """Whether (nearly) all of the last step went as by lru."""
    return status["hits"] <= _FEW * (status["hits"] + status["misses"])


class Driver:
    """What runs at the ends of steps: the planner, the trace's writer, what follows free memory."""

    def __init__(
        self, planner: Planner | None, file: TraceFile | None, follower: Follower | None = None
    ) -> None:
        self.planner, self.file, self.follower = planner, file, follower
        core.set_step_listener(self.step_ended)

    def step_ended(self) -> None:
        """Called by native code; nothing leaves it that would reach the program."""
        if self.follower is not None and self.follower.step_ended():
            self.restart()
        if self.planner is not None:
            self.planner.step_ended()
        if self.file is not None:
            self.file.step_ended()

    def stop(self) -> None:
        """Before umem goes off."""
        core.set_step_listener(None)
        core.set_advisor(None)
        if self.planner is not None:
            self.planner.stop()
        if self.file is not None:
            self.file.close()

    def budget_changed(self) -> None:
        """The program set a budget: from here on it follows nothing."""
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


def start(settings: Settings) -> Driver | None:
    """What the settings ask for, with umem just turned on; None where that is nothing.

    Raises:
        ConfigError: the trace's file cannot be written.
    """
    planner = None
    if core.current_options().policy == "planned":
        policy = registry.make(settings.policy)
        planner = Planner(policy, device, _budget, Layouts(settings.layout))
        if (victims := getattr(policy, "victims", None)) is not None:
            from .policies.advisor import advisor

            core.set_advisor(advisor(victims))
    file = None if settings.trace is None else _open(settings, settings.trace)
    follower = _follower(settings)
    return Driver(planner, file, follower) if planner or file or follower else None


def _follower(settings: Settings) -> Follower | None:
    """None where the budget is fixed, or is the software device's only measure."""
    options = core.current_options()
    if not settings.budget.auto or (options.device == "soft" and not options.device_bytes):
        return None
    from . import pressure

    headroom = pressure.no_headroom if options.device == "soft" else pressure.cuda_headroom
    return pressure.Follower(options.floor_bytes, headroom)


def _budget() -> int:
    return core.stats()["budget_bytes"]


@functools.cache
def device_of(gpu: str) -> DeviceProfile:
    """The figures that plans for this GPU reckon with."""
    profile = devices.find(_nearest_profile(gpu))
    _log.info("plans reckon with the figures of %s: %s", profile.name, profile.source)
    return profile


def device() -> DeviceProfile:
    """The figures of the device that umem is on for."""
    options = core.current_options()
    if options.device == "soft":
        return devices.find(options.profile)
    return device_of(_gpu_name())


def _nearest_profile(gpu: str) -> str:
    """The profile of the same GPU, as far as names tell."""
    words = gpu.lower().replace("-", " ").split()
    for name in devices.names():
        if name.split("-")[0].removeprefix("rtx") in words or name.split("-")[0] in words:
            return name
    return _GPU_DEFAULT


def _gpu_name() -> str:
    torch = sys.modules.get("torch")
    if torch is None:  # a program of CuPy or cuda.core
        found = core.probe_cuda()["devices"]
        return found[0]["name"] if found else "cuda"
    # Before the program uses the GPU, the question would start CUDA, and no child could be forked.
    used: bool = torch.cuda.is_initialized()
    return str(torch.cuda.get_device_name()) if used else "cuda"


def _open(settings: Settings, path: Path) -> TraceFile:
    from .trace.recording import TraceFile

    try:
        return TraceFile(path, _header)
    except OSError as error:
        origin, reason = settings.origins["trace"], f"{path}: {error.strerror or error}"
        allowed = "a file in a directory that can be written"
        raise config.refusal(BY_NAME["trace"], origin, reason, allowed) from None


def _header() -> Header:
    from .trace.schema import Header

    options = core.current_options()
    device = options.profile if options.device == "soft" else _gpu_name()
    torch = sys.modules.get("torch")
    source = "a program without torch" if torch is None else f"torch {torch.__version__}"
    return Header(device=device, source=source)
