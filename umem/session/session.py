"""The session: umem turned on, and the functions of the package that act on it."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..base import locks
from ..base import log as log_output
from ..base.units import format_bytes
from ..config import ranks
from ..config.options import BY_NAME
from ..config.settings import Settings, difference, differing, load
from ..errors import ConfigError, StateError
from ..integrations.torch.version import require_torch, torch_threads
from ..policies.registry import name_of
from . import resolve
from .statistics import stats

if TYPE_CHECKING:
    from ..base.stats import Stats
    from ..integrations.bindings import Attached
    from ..monitor.summary import Summary
    from ..policies.base import Policy
    from .planned_step import PlannedStep
    from .step_planner import StepPlanner

_log = logging.getLogger("umem")
_lock = locks.reentrant()


class Session:
    """umem turned on: its settings, its attachment to torch and the parts that run with it.

    As a context manager it turns umem off when the block ends. A second `enable` with equal options
    returns a session that leaves umem on, because the first session is still active. With
    `allocator="pool"`, umem serves only the allocations of the block, on this thread.
    """

    def __init__(self, settings: Settings, attached: Attached) -> None:
        self.settings = settings
        self.attached = attached
        self.planner: StepPlanner | None = None  # runs at the end of each step
        self.leaving = False  # the process ends
        self._parts = contextlib.ExitStack()
        self._checks: list[Callable[[], None]] = []
        self._routed = contextlib.ExitStack()

    def __repr__(self) -> str:
        wanted = self.settings
        policy = name_of(wanted.policy)
        return f"<umem session: budget {wanted.budget}, {policy}, device {wanted.device}>"

    @property
    def pool(self) -> Any:
        """The `torch.cuda.MemPool` of the allocator `pool`; None with other allocators."""
        return self.attached.pool

    def __enter__(self) -> Session:
        if _current is None or _current.attached is not self.attached:
            raise StateError("this session has ended; call umem.enable() again")
        if self.pool is not None:
            import torch

            self._routed.enter_context(torch.cuda.use_mem_pool(self.pool))
        return self

    def __exit__(self, *error: object) -> None:
        self._routed.close()
        if _current is self:
            disable()

    def at_end(self, remove: Callable[[], None], check: Callable[[], None] | None = None) -> None:
        """Call `remove` when the session ends, before the parts that were added earlier.

        `check` raises a StateError where `remove` cannot run, before anything has changed.
        """
        self._parts.callback(remove)
        if check is not None:
            self._checks.append(check)

    def check_end(self) -> None:
        """Raise a StateError if a part cannot be removed now."""
        for check in self._checks:
            check()

    def begin(self, policy: Policy | None) -> None:
        """Start the parts that the settings request; `policy` makes the plans."""
        from . import step_planner

        settings = self.settings
        if isinstance(settings.trace, Path) and not self.owns("trace"):
            _log.info("no trace: %s belongs to a parent process", settings.trace)
            settings = dataclasses.replace(settings, trace=None)
        if isinstance(settings.top, Path) and not self.owns("top"):
            _log.info("no socket: %s belongs to a parent process", settings.top)
            settings = dataclasses.replace(settings, top=False)
        self.planner = step_planner.start(settings, policy)
        if settings.recompute != "off":
            from ..recompute.executor.automatic import Automatic

            self.at_end(Automatic(settings.recompute).remove)
        if settings.top:
            from ..monitor import server

            server.start(settings.top, description)
            self.at_end(server.stop)

    def owns(self, name: str) -> bool:
        """Return whether an option is this process's own, not that of a variable's first user."""
        option = BY_NAME[name]
        # `umem run` passes what follows its flags on by variables.
        by_variable = self.settings.origins[name] in (option.env, option.flag)
        return not by_variable or ranks.owns(option.env)

    def end(self) -> None:
        """Remove the parts; umem's memory and its attachment to torch stay."""
        try:
            self._parts.close()
        finally:
            planner, self.planner = self.planner, None
            if planner is not None:
                planner.stop()


_current: Session | None = None
_last: tuple[str, dict[str, Any]] = "", {}  # `_findings` of a session that has ended


def start(settings: Settings, add_parts: Callable[[Session], None] | None = None) -> Session:
    """Turn umem on; `umem.enable` is this with the settings of its options.

    Args:
        settings: the options.
        add_parts: adds the parts that this package does not know; an error turns umem off again.

    Raises:
        UmemError: as in `umem.enable`.
    """
    global _current
    with _lock:
        if _current is not None:
            if differing(_current.settings, settings):
                raise StateError(difference(_current.settings, settings))
            if settings.origins["summary"] == "summary=":  # after UMEM=1 or `umem run`
                _current.settings = dataclasses.replace(
                    _current.settings,
                    summary=settings.summary,
                    origins={**_current.settings.origins, "summary": settings.origins["summary"]},
                )
                _tell_at_exit(_current)
            return Session(settings, _current.attached)
        log_output.set_up(settings.log, ranks.name())
        # The policy comes first: if it fails to load, umem stays off.
        policy = resolve.planning_policy(settings.policy, settings.origins["policy"])
        _current = Session(settings, _attach(settings))
        try:
            _current.begin(policy)
            if add_parts is not None:
                add_parts(_current)
        except BaseException:
            disable()
            raise
        _tell_at_exit(_current)
        return _current


def disable() -> None:
    """Restore torch's allocator; a no-op if umem is off. Tensors in umem's memory stay valid.

    Raises:
        StateError: called inside an operator or a dispatch mode, or on another thread than
            `enable`, with the Python observer; or, with the option `optimizer`, while an optimizer
            updates. umem stays on.
    """
    global _current, _last
    with _lock:
        session = _current
        if session is None:
            return
        from ..base.native import core
        from ..integrations import blocks

        session.check_end()
        core.bring_awaited()  # while umem still sees all operators
        try:
            _border(session.attached.device, session.settings.allocator).detach()
        except RuntimeError as error:
            if session.settings.observer != "python":
                raise
            raise StateError(
                "the Python observer cannot be removed inside an operator or another dispatch "
                "mode, nor on another thread; call umem.disable() outside of it, on the thread of "
                "umem.enable()"
            ) from error
        blocks.EXTERNAL.remove()
        try:
            _last = _findings() if session.settings.summary else ("", {})
        finally:
            try:
                session.end()
            finally:  # an interrupt, or a handler that has turned umem off, leaves nothing half on
                core.stop()
                blocks.umem_turned_off()
                _current = None


def is_enabled() -> bool:
    """Return whether umem is on."""
    return _current is not None


def sees_every_thread() -> bool:
    """Return whether umem is on and observes torch's operators on all threads."""
    return observer() == "native"


def observer() -> str:
    """Return the observer of operators: "native" or "python"; "off" while umem is off.

    Without torch there is no observer, and the program's own reports count as "python".
    """
    if _current is None or _current.settings.observer == "off":
        return "off"
    seen_by = _current.attached.observer
    return "python" if seen_by == "off" else seen_by


def torch_extension() -> ModuleType:
    """Return the C++ extension for torch; the observer has to be "native"."""
    from ..integrations.torch.observer import extension

    return extension()


def current_settings() -> Settings | None:
    """Return the options in force; None if umem is off."""
    return None if _current is None else _current.settings


def summary() -> Summary:
    """Return the statistics as a summary: text, and a table in notebooks."""
    from ..base.native import core
    from ..integrations import blocks
    from ..monitor import summary as text

    now, (why, known) = stats(), _findings()
    advice = text.advice(now, why, core.faults_by_operator(), **known)
    return text.Summary(now, **description(), holders=blocks.holders(), advice=advice)


def description() -> dict[str, str]:
    """Return the device, the policy and the allocator of the session, as text."""
    session = _current  # another thread may turn umem off
    if session is None:
        return {"device": "off", "policy": "-", "allocator": ""}
    from ..base.native import core

    options, attached = core.current_options(), session.attached
    return {
        "device": options.device if options.device == "cuda" else f"soft:{options.profile}",
        "policy": name_of(session.settings.policy),
        "allocator": f"{attached.kind}: {attached.why}",
    }


def set_budget(budget: str | int, host_budget: str | int | None = None) -> None:
    """Change the budget immediately, up or down; without `host_budget`, the host budget stays.

    Args:
        budget: bytes, or text such as "8GiB"; on the software device also the other forms of the
            option `budget`.
        host_budget: as the option `host_budget`; None keeps the present one.

    Raises:
        ConfigError: the budget is malformed or below the minimum.
        OutOfMemoryError: pins and running operators hold more than the budget, which stays.
        StateError: umem is off.
    """
    if budget is None:  # for an option, it would be the default
        raise ConfigError("umem.set_budget(None): allowed: bytes, or text such as '8GiB'")
    with _lock:
        session = require_session("set_budget")
        asked = load({"budget": budget, "host_budget": host_budget})
        host = session.settings.host_budget
        origins = {**session.settings.origins, "budget": asked.origins["budget"]}
        if host_budget is not None:
            host, origins["host_budget"] = asked.host_budget, asked.origins["host_budget"]
        changed = dataclasses.replace(
            session.settings, budget=asked.budget, host_budget=host, origins=origins
        )
        from ..base.native import core

        device = session.attached.device
        count, host_count = resolve.budgets(changed, device, _threads(changed.allocator))
        if count == 0:
            raise ConfigError(
                f"umem.set_budget({budget!r}): allowed on a GPU: bytes as 8GiB; only umem.enable() "
                "takes a share of the device's memory, or auto"
            )
        if host_budget is None:
            host_count = core.current_options().host_budget_bytes
        staging = core.current_options().staging_bytes
        least = core.current_options().floor_bytes + staging
        if staging and count < least:
            raise ConfigError(
                f"umem.set_budget({budget!r}): pages on their way to and from the disk take "
                f"{format_bytes(staging)} of it; allowed: at least {format_bytes(least)}"
            )
        core.set_budget(count - staging, host_count)
        session.settings = changed
        if session.planner is not None:
            session.planner.budget_changed()


def step() -> None:
    """Mark the end of a step. After the first call, steps end only at such calls.

    Otherwise a step ends with the last `step()` of a torch optimizer before the next forward pass,
    or, without gradients, before the second call of the same module. Call this function in programs
    that repeat something else.

    Raises:
        StateError: umem is off.
    """
    require_session("step")
    from ..base.native import core

    core.step()


def replan() -> None:
    """Discard all plans and make new ones, after the set of pinned tensors changed."""
    with _lock:
        if _current is not None and _current.planner is not None:
            _current.planner.restart()


def planned_step(device: int = 0) -> PlannedStep | None:
    """Return the last recorded and planned step of a device, with the addresses of its tensors.

    None before the first such step.
    """
    session = _current
    planner = None if session is None else session.planner
    return planner.planned_step(device) if planner is not None else None


def host_memory() -> contextlib.AbstractContextManager[None]:
    """Allocate this thread's CPU tensors in host memory inside the context.

    On the software device, CPU tensors otherwise represent tensors of the device.
    """
    from ..integrations.torch import cpu

    return cpu.host_memory()


def require_session(what: str) -> Session:
    """Return the session, for the function `umem.what()`.

    Raises:
        StateError: umem is off.
    """
    if _current is None:
        raise StateError(f"umem.{what}() needs umem to be on; call umem.enable() first")
    return _current


def _border(device: str, allocator: str) -> ModuleType:
    """Return the integration that gives torch memory of `device`."""
    if allocator == "none":
        from ..integrations import no_torch

        return no_torch
    from ..integrations.torch import cpu, cuda

    return cuda if device == "cuda" else cpu


def _threads(allocator: str) -> int:
    """Return the number of threads that compute at the same time on the software device."""
    return 1 if allocator == "none" else torch_threads()


def _attach(settings: Settings) -> Attached:
    from ..base.native import core

    if settings.allocator != "none":
        require_torch()
    options = resolve.native_options(settings, _threads(settings.allocator))
    if settings.device.kind == "auto" and options.device == "soft":
        _log.warning(
            "no usable GPU (%s); using the software device. Set UMEM_DEVICE=soft to silence this",
            resolve.why_no_gpu(),
        )
    if settings.disk is not None and options.device == "cuda" and settings.optimizer.value == 0:
        _log.warning(
            "on a GPU the disk has only the states of optimizers that are updated on the host; "
            "umem.page_optimizer(..., update='host') does that"
        )
    border = _border(options.device, settings.allocator)
    border.check(settings.allocator)
    core.start(options)
    try:
        attached: Attached = border.attach(
            settings.allocator, settings.observer, settings.torch_ext_cache
        )
    except BaseException:
        core.stop()
        raise
    _log.info("on, allocator %s: %s", attached.kind, attached.why)
    return attached


def _findings() -> tuple[str, dict[str, Any]]:
    """Return why steps have no plan, and what else `monitor.summary.advice` takes."""
    from ..base.native import core

    session = _current  # another thread may turn umem off
    if session is None:
        return _last
    settings, planner = session.settings, session.planner
    why = "" if planner is None else planner.why_unplanned()
    both = settings.recompute != "off" and settings.optimizer.value != 0
    found: dict[str, Any] = {
        "disk_writes": settings.disk_writes,
        "tried": settings.trace is not None or both,
    }
    devices = {device: stats(device) for device in core.opened_devices()}
    if not devices:
        return why, found
    # Budgets are those of single devices, and so is the one to change.
    device = max(devices, key=lambda device: _need(devices[device]))
    fullest = found["fullest"] = devices[device]
    if fullest.peak_live_bytes > fullest.budget_bytes and planner is not None:
        planned = planner.planned_step(device)
        found["step"] = None if planned is None else planned.cost(fullest.budget_bytes)
    return why, found


def _need(now: Stats) -> float:
    """Return how many times its budget a device needed."""
    return max(now.peak_live_bytes, now.largest_op_bytes) / max(now.budget_bytes, 1)


def _tell_at_exit(session: Session) -> None:
    if session.settings.summary:
        # Now: what an import runs at exit makes the interpreter forget an interrupt, and it would
        # exit with code 1.
        from ..monitor import summary  # noqa: F401
    atexit.unregister(_at_exit)
    atexit.register(_at_exit, os.getpid(), session.settings.summary, session.owns("summary"))


def _at_exit(process: int, summary: bool, is_own: bool) -> None:
    # A worker that has inherited the options and trained nothing has nothing to say.
    if os.getpid() != process:
        return  # a forked child; the parent prints the summary
    with _lock:
        try:
            why, known = _findings() if summary else ("", {})
        finally:
            if _current is not None:
                _current.leaving = True
                _current.end()
    if not summary or sys.stderr is None:  # cron closes it
        return
    now = stats()
    if is_own or now.steps or now.bytes_in or now.bytes_out:
        from ..base.native import core
        from ..monitor import summary as text

        faults, device = core.faults_by_operator(), core.current_options().device
        sys.stderr.write(text.closing(now, why, faults, ranks.name(), device, **known) + "\n")


def follow_free_memory() -> None:
    """Adjust the budget `auto` to the memory that is free now."""
    if _current is not None and _current.planner is not None:
        _current.planner.follow_free_memory()
