"""The session that `umem.enable` starts, and the functions of the package that act on it."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..base import log as log_output
from ..base.stats import Stats
from ..config import ranks
from ..config.settings import Settings, difference, load
from ..errors import ConfigError, StateError
from ..integrations.torch.version import require_torch, torch_threads
from ..policies.registry import name_of
from . import resolve

if TYPE_CHECKING:
    import torch

    from ..integrations.bindings import Attached
    from ..monitor.summary import Summary
    from ..policies.base import PlanFunction, Policy
    from .device_planner import PlannedStep
    from .step_driver import StepLoop

_log = logging.getLogger("umem")
_ROOT = __name__.removesuffix(".session.session")
_lock = threading.RLock()

native_options = resolve.native_options  # for commands that check before they start anything


class Session:
    """A handle of umem being on; used as a context manager, leaving it turns umem off.

    A second `enable` with equal options returns a session that leaves umem on at its end, because
    the first session is still active. With `allocator="pool"` only the allocations of the block on
    this thread come from umem.
    """

    def __init__(self, settings: Settings, owner: bool, attached: Attached) -> None:
        self.settings = settings
        self.attached = attached
        self._owner = owner
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
        if self.pool is not None:
            import torch

            self._routed.enter_context(torch.cuda.use_mem_pool(self.pool))
        return self

    def __exit__(self, *error: object) -> None:
        self._routed.close()
        if self._owner and _session is self:
            disable()


_session: Session | None = None
_driver: StepLoop | None = None  # runs at the end of each step
_undo = contextlib.ExitStack()  # other parts to remove at the end
_leaving = False  # the process ends
_before_disable: list[Callable[[], None]] = []


def enable(
    *,
    budget: str | int | None = None,
    host_budget: str | int | None = None,
    policy: Policy | PlanFunction | str | None = None,
    min_swap: str | int | None = None,
    device: str | None = None,
    allocator: str | None = None,
    log: str | None = None,
    guard: bool | None = None,
    observer: str | None = None,
    recompute: str | None = None,
    optimizer: str | None = None,
    optimizer_threads: int | None = None,
    optimizer_buffers: str | int | None = None,
    torch_ext_cache: str | Path | None = None,
    trace: str | Path | None = None,
    summary: bool | None = None,
    layout: str | None = None,
    top: str | Path | bool | None = None,
    watchdog: str | float | None = None,
) -> Session:
    """Make umem torch's allocator from now on; tensors that exist already stay where they are.

    What is not given comes from the environment, pyproject.toml or the default: docs/options.md.
    Sizes are in bytes or text such as "8GiB". A policy is a name, `module:attribute`,
    `file.py:attribute`, an object with a method `plan(trace, device, budget)`, or such a function
    (docs/policies.md). Equal options again do nothing.

    Raises:
        ConfigError: an unknown option or a bad value, from whichever source.
        NotSupportedError: torch is absent or too old, or this machine cannot do it.
        StateError: umem is on with other options, or CUDA is initialised already.
    """
    settings = load(
        {
            "budget": budget,
            "host_budget": host_budget,
            "policy": policy,
            "min_swap": min_swap,
            "device": device,
            "allocator": allocator,
            "log": log,
            "guard": guard,
            "observer": observer,
            "recompute": recompute,
            "optimizer": optimizer,
            "optimizer_threads": optimizer_threads,
            "optimizer_buffers": optimizer_buffers,
            "torch_ext_cache": torch_ext_cache,
            "trace": trace,
            "summary": summary,
            "layout": layout,
            "top": top,
            "watchdog": watchdog,
        }
    )
    global _session
    with _lock:
        if _session is not None:
            if _session.settings != settings:
                raise StateError(difference(_session.settings, settings))
            return Session(settings, owner=False, attached=_session.attached)
        log_output.set_up(settings.log, ranks.name())
        planning = resolve.planning_policy(settings)  # first: what fails to load leaves umem off
        _session = Session(settings, owner=True, attached=_attach(settings))
        _start_steps(settings, planning)
        return _session


def enable_at_import() -> None:
    """Enable umem inside `import torch`, for `UMEM=1`, with the options of the environment.

    A launcher such as torchrun stays as it is; the ranks that it starts have umem.

    Raises:
        UmemError: as in `enable`.
        ConfigError: the allocator is `pool`, which serves the block of a session only.
    """
    if ranks.is_launcher():
        return
    if load().allocator == "pool":
        raise ConfigError(
            "UMEM_ALLOCATOR=pool serves a part of a program; write `with umem.enable():` around it "
            "instead of setting UMEM=1"
        )
    enable()


def disable() -> None:
    """Restore torch's allocator; a no-op if umem is off. Tensors in umem's memory stay valid.

    Raises:
        StateError: called inside an operator, with the Python observer.
    """
    global _session
    with _lock:
        if _session is None:
            return
        from ..base.native import core
        from ..integrations import blocks

        for call in _before_disable:
            call()
        blocks.EXTERNAL.remove()
        try:
            _border(_session.attached.device, _session.settings.allocator).detach()
        except RuntimeError as error:
            if _session.settings.observer != "python":
                raise
            raise StateError(
                "the Python observer cannot be removed inside an operator; call umem.disable() "
                "outside of it"
            ) from error
        _stop_steps()
        core.stop()
        blocks.umem_turned_off()
        _session = None


def before_disable(call: Callable[[], None]) -> None:
    """Call this at each `disable` from now on, while umem still sees all operators."""
    _before_disable.append(call)


def is_enabled() -> bool:
    """Return whether umem is on."""
    return _session is not None


def sees_every_thread() -> bool:
    """Return whether umem is on and learns of torch's operators on all threads."""
    return observer() == "native"


def observer() -> str:
    """Return what reports operators to umem: "native" or "python"; "off" while umem is off.

    Without torch nothing does; its user's own reports are taken as with "python".
    """
    if _session is None or _session.settings.observer == "off":
        return "off"
    seen_by = _session.attached.observer
    return "python" if seen_by == "off" else seen_by


def torch_extension() -> ModuleType:
    """Return the C++ extension for torch, where the observer is "native"."""
    from ..integrations.torch.observer import extension

    return extension()


def current_settings() -> Settings | None:
    """Return the options in force; None if umem is off."""
    return None if _session is None else _session.settings


def stats(device: int | torch.device | str | None = None) -> Stats:
    """Return umem's present statistics; all zero before the first `enable`.

    Args:
        device: the device to count, as torch names it, such as 1 or "cuda:1". None: all that the
            program uses together. `steps` and `plans_rolled_back` are those of the program.

    Raises:
        ConfigError: umem serves no such device.
        NotSupportedError: the native core is not installed.
    """
    from ..base.native import core

    return Stats(**core.stats(None if device is None else _ordinal(device)))


def _ordinal(device: int | torch.device | str) -> int:
    """Return the number of a device; that of the software device, which is torch's cpu, is 0."""
    from ..base.native import core

    refused = f"umem.stats({device!r}): allowed: a number, or a device as torch names it (cuda:1)"
    if isinstance(device, int) and not isinstance(device, bool):
        if not 0 <= device < 1 << 16:
            raise ConfigError(refused)
        return device
    import torch

    if not isinstance(device, (str, torch.device)):
        raise ConfigError(refused)
    try:
        named = torch.device(device)
    except RuntimeError:
        raise ConfigError(refused) from None
    served = "cpu" if core.current_options().device == "soft" else "cuda"
    if named.type != served:
        raise ConfigError(f"umem.stats({device!r}): umem serves torch's device {served}")
    if named.index is None:
        return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else 0
    return int(named.index)


def reset_peak_stats() -> None:
    """Reset the `peak_` statistics to the present values."""
    from ..base.native import core

    core.reset_peak_stats()


def summary() -> Summary:
    """Return the statistics as a summary: text, and a table in notebooks."""
    from ..base.native import core
    from ..integrations import blocks
    from ..monitor import summary as text

    now = stats()
    advice = text.advice(now, _why_unplanned(), core.faults_by_operator())
    return text.Summary(now, **description(), holders=blocks.holders(), advice=advice)


def description() -> dict[str, str]:
    """Return the device, the policy and the allocator of the session, as text."""
    if _session is None:
        return {"device": "off", "policy": "-", "allocator": ""}
    from ..base.native import core

    options, attached = core.current_options(), _session.attached
    return {
        "device": options.device if options.device == "cuda" else f"soft:{options.profile}",
        "policy": name_of(_session.settings.policy),
        "allocator": f"{attached.kind}: {attached.why}",
    }


def set_budget(budget: str | int, host_budget: str | int | None = None) -> None:
    """Change the budget immediately, up or down; a host budget that is not given stays.

    Args:
        budget: bytes, or text such as "8GiB"; on the software device also the other forms of the
            option `budget`.
        host_budget: as the option `host_budget`; None keeps the present one.

    Raises:
        ConfigError: the budget is malformed or below the minimum.
        StateError: umem is off.
    """
    with _lock:
        session = require_session("set_budget")
        asked = load({"budget": budget, "host_budget": host_budget})
        host = session.settings.host_budget if host_budget is None else asked.host_budget
        changed = dataclasses.replace(
            session.settings, budget=asked.budget, host_budget=host, origins=asked.origins
        )
        from ..base.native import core

        if session.attached.device == "cuda":
            count, frames = resolve.cuda_budget_bytes(changed), 0
            if count == 0:
                raise ConfigError(
                    f"umem.set_budget({budget!r}): allowed on a GPU: bytes such as 8GiB; a share "
                    "of the device's memory, or auto, can be given to umem.enable() only"
                )
        else:
            frames = count = resolve.budget_bytes(changed, _threads(changed))
        if host_budget is None:
            host_count = core.stats()["host_budget_bytes"]
        else:
            host_count = resolve.host_budget_bytes(changed, frames)
        core.set_budget(count, host_count)
        session.settings = changed
        if _driver is not None:
            _driver.budget_changed()


def step() -> None:
    """Mark the end of a step. From the first call on, steps end at such calls only.

    Without it a step ends with the last `step()` of a torch optimizer before the next forward pass,
    and where a module that was called in it without gradients is called again. Call it where this
    is not what repeats in the program.

    Raises:
        StateError: umem is off.
    """
    require_session("step")
    from ..base.native import core

    core.step()


def replan() -> None:
    """Discard all plans and make new ones, after the set of pinned tensors changed."""
    with _lock:
        if _driver is not None:
            _driver.restart()


def planned_step(device: int = 0) -> PlannedStep | None:
    """Return the step of a device that was recorded and planned last; None before one.

    With the addresses of its tensors.
    """
    return _driver.planned_step(device) if _driver is not None else None


def host_memory() -> contextlib.AbstractContextManager[None]:
    """Allocate torch's CPU tensors in host memory, where they else stand for the device's.

    For this thread, inside the context.
    """
    from ..integrations.torch import cpu

    return cpu.host_memory()


def require_session(what: str) -> Session:
    """Return the session, for the function `umem.what()`.

    Raises:
        StateError: umem is off.
    """
    if _session is None:
        raise StateError(f"umem.{what}() needs umem to be on; call umem.enable() first")
    return _session


def _border(device: str, allocator: str) -> ModuleType:
    """Return the integration through which torch gets memory of `device`."""
    if allocator == "none":
        from ..integrations import no_torch

        return no_torch
    from ..integrations.torch import cpu, cuda

    return cuda if device == "cuda" else cpu


def _threads(settings: Settings) -> int:
    """Return the number of threads that compute on the software device at the same time."""
    return 1 if settings.allocator == "none" else torch_threads()


def _attach(settings: Settings) -> Attached:
    from ..base.native import core

    if settings.allocator != "none":
        require_torch()
    options = resolve.native_options(settings, _threads(settings))
    if settings.device.kind == "auto" and options.device == "soft":
        _log.warning(
            "no usable GPU (%s); using the software device. Set UMEM_DEVICE=soft to silence this",
            resolve.why_no_gpu(),
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


def _start_steps(settings: Settings, policy: Policy | None) -> None:
    from . import step_driver

    global _driver
    try:
        _driver = step_driver.start(settings, policy)
        if settings.recompute != "off":
            from ..recompute.executor.automatic import Automatic

            _undo.callback(Automatic(settings.recompute).remove)
        if settings.optimizer.value != 0:
            # By its name: that package builds on this one.
            module = importlib.import_module(f"{_ROOT}.offload.optimizer.automatic")
            automatic = module.Automatic(settings.optimizer.value)
            _undo.callback(lambda: automatic.remove(give_back=not _leaving))
        if settings.top:
            from ..monitor import server

            server.start(settings.top, description)
            _undo.callback(server.stop)
    except BaseException:
        disable()
        raise
    atexit.unregister(_at_exit)
    atexit.register(_at_exit, os.getpid(), settings.summary)


def _why_unplanned() -> str:
    return _driver.why_unplanned() if _driver is not None else ""


def _stop_steps() -> None:
    global _driver
    try:
        _undo.close()
    finally:
        driver, _driver = _driver, None
        if driver is not None:
            driver.stop()


def _at_exit(process: int, summary: bool) -> None:
    if os.getpid() != process:
        return  # a forked child; the parent prints the summary
    global _leaving
    with _lock:
        why = _why_unplanned()
        _leaving = True
        _stop_steps()
    if summary:
        from ..base.native import core
        from ..monitor import summary as text

        sys.stderr.write(text.closing(stats(), why, core.faults_by_operator(), ranks.name()) + "\n")


def follow_free_memory() -> None:
    """Adjust a budget of `auto` to the memory that is free now."""
    if _driver is not None:
        _driver.follow_free_memory()
