"""The façade: turning umem on and off, and its figures."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import config, startup
from .config import Settings
from .errors import ConfigError, StateError
from .statistics import Stats

if TYPE_CHECKING:
    from .autoplan import Driver
    from .integrations.attached import Attached
    from .report.text import Summary

_log = logging.getLogger("umem")
_lock = threading.RLock()

native_options = startup.native_options  # for commands that check before they start anything


class Session:
    """umem being on. As a context manager, leaving it turns umem off again.

    A second `enable` with equal options gives a session that leaves umem on at its end, because
    the first one is still inside. With `allocator="pool"` the block's allocations on this thread
    come from umem, and no others.
    """

    def __init__(self, settings: Settings, owner: bool, attached: Attached) -> None:
        self.settings = settings
        self.attached = attached
        self._owner = owner
        self._routed = contextlib.ExitStack()

    def __repr__(self) -> str:
        wanted = self.settings
        return f"<umem session: budget {wanted.budget}, {wanted.policy}, device {wanted.device}>"

    @property
    def pool(self) -> Any:
        """The `torch.cuda.MemPool` of the allocator `pool`; None with the others."""
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
_driver: Driver | None = None  # what runs at the ends of steps
_undo = contextlib.ExitStack()  # what else is taken back at the end


def enable(
    *,
    budget: str | int | None = None,
    host_budget: str | int | None = None,
    policy: str | None = None,
    min_swap: str | int | None = None,
    device: str | None = None,
    allocator: str | None = None,
    log: str | None = None,
    guard: bool | None = None,
    observer: str | None = None,
    recompute: str | None = None,
    torch_ext_cache: str | Path | None = None,
    trace: str | Path | None = None,
    summary: bool | None = None,
    layout: str | None = None,
    top: str | Path | bool | None = None,
) -> Session:
    """Make umem torch's allocator from now on; tensors that exist already stay where they are.

    What is not given comes from the environment, pyproject.toml or the default: docs/options.md.
    Sizes are in bytes or text such as "8GiB". Equal options again do nothing.

    Raises:
        ConfigError: an unknown option or a bad value, from whichever source.
        NotSupportedError: torch is absent or too old, or this machine cannot do it.
        StateError: umem is on with other options, or CUDA is initialised already.
    """
    settings = config.load(
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
            "torch_ext_cache": torch_ext_cache,
            "trace": trace,
            "summary": summary,
            "layout": layout,
            "top": top,
        }
    )
    global _session
    with _lock:
        if _session is not None:
            if _session.settings != settings:
                raise StateError(config.difference(_session.settings, settings))
            return Session(settings, owner=False, attached=_session.attached)
        startup.set_up_log(settings.log)
        _session = Session(settings, owner=True, attached=_attach(settings))
        _start_steps(settings)
        return _session


def enable_at_import() -> None:
    """What `UMEM=1` does inside `import torch`: `enable` with what stands in the environment.

    Raises:
        As `enable`; ConfigError: the allocator `pool`, which serves the block of a session.
    """
    if config.load().allocator == "pool":
        raise ConfigError(
            "UMEM_ALLOCATOR=pool serves a part of a program: write `with umem.enable():` around it "
            "in place of UMEM=1"
        )
    enable()


def disable() -> None:
    """Give torch its allocator back. Tensors made under umem stay valid; off already: nothing.

    Raises:
        StateError: inside an operator, with the Python observer.
    """
    global _session
    with _lock:
        if _session is None:
            return
        from .integrations import blocks
        from .native import core

        blocks.GUESTS.remove()
        try:
            _border(_session.attached.device, _session.settings.allocator).detach()
        except RuntimeError as error:
            if _session.settings.observer != "python":
                raise
            raise StateError(
                "the Python observer cannot be taken away inside an operator; call umem.disable() "
                "outside of it"
            ) from error
        _stop_steps()
        core.stop()
        blocks.umem_went_off()
        _session = None


def is_enabled() -> bool:
    """Whether umem is torch's allocator now."""
    return _session is not None


def stats() -> Stats:
    """umem's figures as of now; all zero before the first `enable`.

    Raises:
        NotSupportedError: the native core is not installed.
    """
    from .native import core

    return Stats(**core.stats())


def reset_peak_stats() -> None:
    """Let the `peak_` figures start from the present ones."""
    from .native import core

    core.reset_peak_stats()


def summary() -> Summary:
    """The figures of `stats` for people: text, and a table where a notebook shows it."""
    from .integrations import blocks
    from .report import text

    return text.Summary(stats(), **whereabouts(), holders=blocks.holders())


def whereabouts() -> dict[str, str]:
    """On what device, by what policy and through what allocator umem works."""
    if _session is None:
        return {"device": "off", "policy": "-", "allocator": ""}
    from .native import core

    options, attached = core.current_options(), _session.attached
    return {
        "device": options.device if options.device == "cuda" else f"soft:{options.profile}",
        "policy": _session.settings.policy,
        "allocator": f"{attached.kind}: {attached.why}",
    }


def set_budget(budget: str | int, host_budget: str | int | None = None) -> None:
    """Change the budget, at once and in both directions; a host budget not given stays.

    Raises:
        ConfigError: malformed or below the floor.
        StateError: umem is off.
    """
    with _lock:
        session = require_session("set_budget")
        asked = config.load({"budget": budget, "host_budget": host_budget})
        host = session.settings.host_budget if host_budget is None else asked.host_budget
        changed = dataclasses.replace(
            session.settings, budget=asked.budget, host_budget=host, origins=asked.origins
        )
        from .native import core

        if session.attached.device == "cuda":
            count, frames = startup.cuda_budget_bytes(changed), 0
            if count == 0:
                raise ConfigError(
                    f"umem.set_budget({budget!r}): allowed on a GPU: bytes as 8GiB; a share of the "
                    "device's memory and auto are for umem.enable()"
                )
        else:
            frames = count = startup.budget_bytes(changed, _threads(changed))
        if host_budget is None:
            host_count = core.stats()["host_budget_bytes"]
        else:
            host_count = startup.host_budget_bytes(changed, frames)
        core.set_budget(count, host_count)
        session.settings = changed
        if _driver is not None:
            _driver.budget_changed()


def step() -> None:
    """Say that one step of the program ended, where no torch optimizer says it.

    Raises:
        StateError: umem is off.
    """
    require_session("step")
    from .native import core

    core.step()


def replan() -> None:
    """Plans were made for other tensors to stay: they are made anew."""
    with _lock:
        if _driver is not None:
            _driver.restart()


def require_session(what: str) -> Session:
    """The session for `umem.what()`.

    Raises:
        StateError: umem is off.
    """
    if _session is None:
        raise StateError(f"umem.{what}() needs umem to be on; call umem.enable() first")
    return _session


def _border(device: str, allocator: str) -> ModuleType:
    """The integration through which torch gets memory of `device`."""
    if allocator == "none":
        from .integrations import alone

        return alone
    from .integrations import torch_cpu, torch_cuda

    return torch_cuda if device == "cuda" else torch_cpu


def _threads(settings: Settings) -> int:
    """Threads that compute on memory of the software device at once."""
    return 1 if settings.allocator == "none" else startup.torch_threads()


def _attach(settings: Settings) -> Attached:
    from .native import core

    if settings.allocator != "none":
        startup.require_torch()
    options = startup.native_options(settings, _threads(settings))
    if settings.device.kind == "auto" and options.device == "soft":
        _log.warning(
            "no GPU that umem can use (%s): the software device it is; UMEM_DEVICE=soft says so",
            startup.why_no_gpu(),
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


def _start_steps(settings: Settings) -> None:
    from . import autoplan

    global _driver
    try:
        _driver = autoplan.start(settings)
        if settings.recompute != "off":
            from .recompute.automatic import Automatic

            _undo.callback(Automatic(settings.recompute).remove)
        if settings.top:
            from . import live

            live.start(settings.top, whereabouts)
            _undo.callback(live.stop)
    except BaseException:
        disable()
        raise
    atexit.unregister(_at_exit)
    atexit.register(_at_exit, os.getpid(), settings.summary)


def _stop_steps() -> None:
    global _driver
    _undo.close()
    driver, _driver = _driver, None
    if driver is not None:
        driver.stop()


def _at_exit(process: int, summary: bool) -> None:
    if os.getpid() != process:
        return  # a forked child, whose parent says it
    with _lock:
        _stop_steps()
    if summary:
        from .report import text

        sys.stderr.write(text.closing(stats()) + "\n")


def follow_free_memory() -> None:
    """Let a budget of `auto` be what the devices have free now."""
    if _driver is not None:
        _driver.follow_free_memory()
