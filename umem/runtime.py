"""The façade: turning umem on and off, its figures, and hints."""

from __future__ import annotations

import dataclasses
import logging
import threading
from pathlib import Path
from types import TracebackType
from typing import Protocol

from . import config, startup
from .config import Settings
from .errors import StateError
from .statistics import Stats

_log = logging.getLogger("umem")
_lock = threading.RLock()

native_options = startup.native_options  # for commands that check before they start anything


class Storage(Protocol):
    """What a hint needs of a tensor's storage."""

    def data_ptr(self) -> int: ...
    def nbytes(self) -> int: ...


class Tensor(Protocol):
    """A torch.Tensor."""

    def untyped_storage(self) -> Storage: ...


class Session:
    """umem being on. As a context manager, leaving it turns umem off again.

    A second `enable` with equal options gives a session that leaves umem on at its end, because
    the first one is still inside.
    """

    def __init__(self, settings: Settings, owner: bool) -> None:
        self.settings = settings
        self._owner = owner

    def __repr__(self) -> str:
        wanted = self.settings
        return f"<umem session: budget {wanted.budget}, {wanted.policy}, device {wanted.device}>"

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._owner and _session is self:
            disable()


_session: Session | None = None


def enable(
    *,
    budget: str | int | None = None,
    host_budget: str | int | None = None,
    policy: str | None = None,
    min_swap: str | int | None = None,
    device: str | None = None,
    log: str | None = None,
    guard: bool | None = None,
    observer: str | None = None,
    torch_ext_cache: str | Path | None = None,
) -> Session:
    """Make umem torch's allocator from now on; tensors that exist already stay where they are.

    What is not given comes from the environment, pyproject.toml or the default: docs/options.md.
    Sizes are in bytes or text such as "8GiB". Equal options again do nothing.

    Raises:
        ConfigError: an unknown option or a bad value, from whichever source.
        NotSupportedError: torch is absent or too old, or this machine cannot do it.
        StateError: umem is on with other options.
    """
    settings = config.load(
        {
            "budget": budget,
            "host_budget": host_budget,
            "policy": policy,
            "min_swap": min_swap,
            "device": device,
            "log": log,
            "guard": guard,
            "observer": observer,
            "torch_ext_cache": torch_ext_cache,
        }
    )
    global _session
    with _lock:
        if _session is not None:
            if _session.settings != settings:
                raise StateError(_difference(_session.settings, settings))
            return Session(settings, owner=False)
        _set_up_log(settings.log)
        _attach(settings)
        _session = Session(settings, owner=True)
        return _session


def disable() -> None:
    """Give torch its allocator back. Tensors made under umem stay valid; off already: nothing.

    Raises:
        StateError: inside an operator, with the Python observer.
    """
    global _session
    with _lock:
        if _session is None:
            return
        from .integrations import torch_cpu
        from .native import core

        try:
            torch_cpu.detach()
        except RuntimeError as error:
            raise StateError(
                "the Python observer cannot be taken away inside an operator; call umem.disable() "
                "outside of it"
            ) from error
        core.stop()
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


def summary() -> str:
    """The figures of `stats` for people, in some lines of text."""
    from .report import text

    device, policy = "off", "-"
    if _session is not None:
        from .native import core

        options = core.current_options()
        device = f"{options.device}:{options.profile}"
        policy = options.policy
    return text.summary(stats(), device=device, policy=policy)


def set_budget(budget: str | int, host_budget: str | int | None = None) -> None:
    """Change the budget, at once and in both directions; a host budget not given stays.

    Raises:
        ConfigError: malformed or below the floor.
        StateError: umem is off.
    """
    with _lock:
        session = _require_session("set_budget")
        asked = config.load({"budget": budget, "host_budget": host_budget})
        host = session.settings.host_budget if host_budget is None else asked.host_budget
        changed = dataclasses.replace(
            session.settings, budget=asked.budget, host_budget=host, origins=asked.origins
        )
        from .native import core

        count = startup.budget_bytes(changed, startup.torch_threads())
        if host_budget is None:
            host_count = core.stats()["host_budget_bytes"]
        else:
            host_count = startup.host_budget_bytes(changed, count)
        core.set_budget(count, host_count)
        session.settings = changed


def step() -> None:
    """Say that one step of the program ended, where no torch optimizer says it.

    Raises:
        StateError: umem is off.
    """
    _require_session("step")
    from .native import core

    core.step()


def prefetch(tensor: Tensor) -> bool:
    """Bring the tensor's storage to the device; False when umem does not hold it.

    Raises:
        StateError: umem is off.
    """
    _require_session("prefetch")
    from .native import core

    storage = tensor.untyped_storage()
    held = core.owns(storage.data_ptr())
    if held:
        core.prefetch(storage.data_ptr(), storage.nbytes())
    return held


def evict(tensor: Tensor) -> bool:
    """Send the tensor's storage to the host; False when umem does not hold it.

    Raises:
        StateError: umem is off.
    """
    _require_session("evict")
    from .native import core

    storage = tensor.untyped_storage()
    held = core.owns(storage.data_ptr())
    if held:
        core.evict(storage.data_ptr(), storage.nbytes())
    return held


def _attach(settings: Settings) -> None:
    from .native import core

    startup.require_torch()
    options = startup.native_options(settings, startup.torch_threads())
    if settings.device.kind == "auto":
        _log.warning(
            "no GPU that umem can use (%s): the software device it is; UMEM_DEVICE=soft says so",
            startup.why_no_gpu(),
        )
    core.start(options)
    try:
        from .integrations import torch_cpu

        torch_cpu.attach(settings.observer, settings.torch_ext_cache)
    except BaseException:
        core.stop()
        raise


def _require_session(what: str) -> Session:
    if _session is None:
        raise StateError(f"umem.{what}() needs umem to be on; call umem.enable() first")
    return _session


def _difference(now: Settings, asked: Settings) -> str:
    names = [f.name for f in dataclasses.fields(Settings) if f.compare]
    differing = [name for name in names if getattr(now, name) != getattr(asked, name)]
    have = ", ".join(f"{name}={getattr(now, name)}" for name in differing)
    want = ", ".join(f"{name}={getattr(asked, name)}" for name in differing)
    return (
        f"umem is on with {have} and was asked for {want}; call umem.disable() first, or "
        "umem.set_budget() to change the budget"
    )


def _set_up_log(level: str) -> None:
    _log.setLevel(level.upper())
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("umem: %(message)s"))
        _log.addHandler(handler)
