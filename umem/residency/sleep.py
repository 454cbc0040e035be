"""Sleep and wake: release device memory temporarily while all pointers stay valid."""

from __future__ import annotations

from collections.abc import Iterable

from ..base.units import format_bytes
from ..errors import ConfigError
from ..session import session

_KEEP = ("host", "discard")
_SHARED = "pool"  # segments of small blocks with mixed tags


class Sleep:
    """The memory that one `umem.sleep` released; as a context manager it wakes that memory.

    Attributes:
        bytes: released device memory of tensors and of freed blocks kept for reuse.
        shown_free: whether `cuMemGetInfo` and `nvidia-smi` show it as free. Otherwise the driver
            counts it as used until another program allocates it.
    """

    def __init__(self, number: int, nbytes: int, shown_free: bool) -> None:
        self._number = number
        self.bytes = nbytes
        self.shown_free = shown_free

    def __repr__(self) -> str:
        where = "" if self.shown_free else ", given back on demand"
        return f"<umem sleep: {format_bytes(self.bytes)} released{where}>"

    def wake(self) -> int:
        """Bring back only the memory that this sleep released; return its bytes.

        Raises:
            StateError: umem is off, or a CUDA graph is being captured.
        """
        return _wake(None, self._number)

    def __enter__(self) -> Sleep:
        return self

    def __exit__(self, *error: object) -> None:
        if session.is_enabled():  # while umem is off, nothing sleeps
            self.wake()


def sleep(tags: Iterable[str] | None = None, keep: str = "host") -> Sleep:
    """Release device memory before this returns; pointers and views stay valid.

    umem returns all cached memory and the memory of live tensors with `tags` to the driver. An
    operator that uses one of these tensors brings it back; `wake` brings all of them back. Pinned
    tensors sleep too, and are pinned again when they are back.

    Args:
        tags: any of param, grad, optimizer, activation, input, workspace, temp, comm, kv_cache,
            pool (all blocks below 2 MiB). None: all of them, not allowed with "discard".
        keep: "host": keep the bytes on the host. "discard": THE CONTENTS ARE LOST, nothing is
            copied, and reads are undefined until the next write.

    Raises:
        ConfigError: an unknown tag or `keep`, or "discard" without tags or of `pool`.
        OutOfMemoryError: the host budget is full; nothing was moved.
        StateError: umem is off, an operator is using one of the tensors, or a CUDA graph is being
            captured; nothing was moved.
        NotSupportedError: memory is not managed here.
        DriverError: the driver refused some of the moves; those tensors stay on the device.
    """
    session.require_session("sleep")
    if keep not in _KEEP:
        raise ConfigError(f"umem.sleep(keep={keep!r}): allowed: {', '.join(_KEEP)}")
    if keep == "discard" and tags is None:
        raise ConfigError(
            "umem.sleep(keep='discard') loses contents, so it needs tags=...; say what "
            "may be lost, as tags=['grad']"
        )
    names = _names("sleep", tags)
    if keep == "discard" and _SHARED in names:
        raise ConfigError(
            f"umem.sleep(keep='discard'): {_SHARED!r} holds small tensors of all kinds; allowed: "
            "the other tags"
        )
    from ..base.native import core

    return Sleep(*core.sleep(names, keep == "discard"))


def wake(tags: Iterable[str] | None = None) -> int:
    """Bring back sleeping memory in the order of its last use; return its bytes.

    The transfers continue after this returns, and each operator waits for the tensors that it uses.
    If the memory no longer fits, the least recently used tensors stay on the host until they are
    needed; pinned tensors come back in place of others.

    Args:
        tags: as for `sleep`; None: all tags, of all sleeps.

    Raises:
        ConfigError: an unknown tag.
        StateError: umem is off, or a CUDA graph is being captured.
        OutOfMemoryError: running operators leave too little memory for pins, which return later.
        DriverError: the driver refused some of the moves; operators repeat them on use.
    """
    return _wake(tags, 0)


def _wake(tags: Iterable[str] | None, number: int) -> int:
    session.require_session("wake")
    names = _names("wake", tags)
    from ..base.native import core

    session.follow_free_memory()  # other programs may have taken some of it meanwhile
    return core.wake(names, number)


def _names(call: str, tags: Iterable[str] | None) -> list[str]:
    from ..base.native import core

    known = core.tags()
    if tags is None:
        return known
    if not isinstance(tags, Iterable):
        raise ConfigError(f"umem.{call}(tags={tags!r}): allowed: a list of tags, or None")
    names = [tags] if isinstance(tags, str) else list(tags)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = repr(unknown[0]) if unknown else "no tag"
        raise ConfigError(f"umem.{call}(tags=...): {what}; allowed: {', '.join(known)}")
    return names
