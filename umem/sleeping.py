"""Sleep and wake: giving the device's memory back for a while, with all pointers unchanged."""

from __future__ import annotations

from collections.abc import Iterable

from . import runtime
from .errors import ConfigError
from .units import format_bytes

_KEEP = ("host", "discard")
_SHARED = "pool"  # segments of small blocks, whose tags are mixed


class Sleep:
    """What one `umem.sleep` gave back. As a context manager, leaving it wakes just that.

    Attributes:
        bytes: of device memory given back: of tensors, and of freed blocks kept for reuse.
    """

    def __init__(self, number: int, nbytes: int) -> None:
        self._number = number
        self.bytes = nbytes

    def __repr__(self) -> str:
        return f"<umem sleep: {format_bytes(self.bytes)} given back>"

    def wake(self) -> int:
        """Bring back what this sleep sent away, and no other; the bytes that this is.

        Raises:
            StateError: umem is off, or a CUDA graph is being captured.
        """
        return _wake(None, self._number)

    def __enter__(self) -> Sleep:
        return self

    def __exit__(self, *error: object) -> None:
        if runtime.is_enabled():  # else nothing is to be brought anywhere
            self.wake()


def sleep(tags: Iterable[str] | None = None, keep: str = "host") -> Sleep:
    """Give device memory back before this returns; pointers and views stay valid.

    All cached memory goes back to the driver, and of what lives the tensors of `tags`. An operator
    that uses one of them brings it back; `wake` brings them all back. Pins do not keep a tensor
    awake, and are in force again when it is back.

    Args:
        tags: of param, grad, optimizer, activation, input, workspace, temp, comm, kv_cache,
            pool (blocks below 2 MiB, whatever they are for). None: all; not with "discard".
        keep: "host": the bytes wait on the host. "discard": THE CONTENTS ARE LOST, nothing is
            copied, and what is read before it is written again is undefined.

    Raises:
        ConfigError: an unknown tag or `keep`, or "discard" without tags or of `pool`.
        OutOfMemoryError: the host budget has no room; nothing was moved.
        StateError: umem is off, an operator is using what was to sleep, or a CUDA graph is being
            captured; nothing was moved.
        NotSupportedError: managed memory does not work here.
        DriverError: the driver refused some of the moves; what it refused stays on the device.
    """
    runtime.require_session("sleep")
    if keep not in _KEEP:
        raise ConfigError(f"umem.sleep(keep={keep!r}): allowed: {', '.join(_KEEP)}")
    if keep == "discard" and tags is None:
        raise ConfigError(
            "umem.sleep(keep='discard') loses contents, so it needs tags=...: name what may be "
            "lost, as tags=['grad']"
        )
    names = _names("sleep", tags)
    if keep == "discard" and _SHARED in names:
        raise ConfigError(
            f"umem.sleep(keep='discard'): {_SHARED!r} holds small tensors of all kinds; allowed: "
            "the other tags"
        )
    from .native import core

    return Sleep(*core.sleep(names, keep == "discard"))


def wake(tags: Iterable[str] | None = None) -> int:
    """Bring back what sleeps, in the order of its last uses; returns the bytes that this is.

    The moves are under way when it returns, and each operator waits for what it uses. Where there
    is no longer room for all, what was used longest ago stays on the host until it is needed; what
    is pinned comes in the place of others.

    Args:
        tags: as for `sleep`; None: all, of all sleeps.

    Raises:
        ConfigError: an unknown tag.
        StateError: umem is off, or a CUDA graph is being captured.
        OutOfMemoryError: running operators leave no room for what is pinned; they bring it later.
        DriverError: the driver refused some of the moves; operators bring those.
    """
    return _wake(tags, 0)


def _wake(tags: Iterable[str] | None, number: int) -> int:
    runtime.require_session("wake")
    names = _names("wake", tags)
    from .native import core

    runtime.follow_free_memory()  # others may have taken some of it meanwhile
    return core.wake(names, number)


def _names(call: str, tags: Iterable[str] | None) -> list[str]:
    from .native import core

    known = core.tags()
    if tags is None:
        return known
    names = [tags] if isinstance(tags, str) else list(tags)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = repr(unknown[0]) if unknown else "no tag"
        raise ConfigError(f"umem.{call}(tags=...): {what}; allowed: {', '.join(known)}")
    return names
