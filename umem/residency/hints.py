"""Hints of a program about its own tensors, described in docs/hints.md.

A wrong hint costs time, never data; only `discard` loses bytes, and only the target's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..base import units
from ..errors import ConfigError, StateError, kind_of
from ..session import session
from .spans import StorageSpan, parts, stream_of

if TYPE_CHECKING:
    from .placement import TensorPlacement

_MAX_BYTES = (1 << 63) - 1


class PinHandle:
    """The effect of `pin`, `keep` or `exclude`, until `remove`; also a context manager.

    It is false if umem held none of the tensors when it was made, and after `remove`.
    """

    def __init__(self, what: str, numbers: list[int]) -> None:
        self._what = what
        self._numbers = numbers

    def __repr__(self) -> str:
        return f"<umem.{self._what}: {'in force' if self._numbers else 'nothing'}>"

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def __enter__(self) -> PinHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """End the effect; a no-op for tensors that were freed or unpinned, and with umem off."""
        if not self._numbers:
            return
        from ..base.native import core

        numbers, self._numbers = self._numbers, []
        for number in numbers:
            core.unhold(number)


def prefetch(target: object) -> bool:
    """Bring the target to the device; return False if umem holds none of it.

    Args:
        target: a tensor or view, a module (its parameters and buffers), or a list, tuple or
            mapping of them. Tensors that share a page or a piece of 64 MiB with it move too.

    Raises:
        OutOfMemoryError: it does not fit; the part that fits is on the device.
        ConfigError: no such target.
        StateError: umem is off.
    """
    from ..base.native import core

    held = _held(target, "prefetch")
    core.prefetch([part.span for part in held])
    return bool(held)


def evict(target: object) -> bool:
    """Send the target to the host; return False if umem holds none of it.

    With mapped memory, small tensors and blocks that share addresses in a layout stay where they
    are.

    Args:
        target: as for `prefetch`.

    Raises:
        StateError: umem is off, or a part is pinned or in use by a running op; nothing is moved.
        OutOfMemoryError: the host budget is full.
        ConfigError: no such target.
    """
    from ..base.native import core

    held = _held(target, "evict")
    core.evict([part.span for part in held])
    return bool(held)


def advise(target: object, advice: str) -> bool:
    """Tell umem how the target is used; return False if umem holds none of it.

    Args:
        target: as for `prefetch`.
        advice: "read_mostly": keep both copies after a read, so that the next eviction needs no
            transfer; a write drops the host's copy until the next read. "none": end this advice.

    Raises:
        ConfigError: unknown advice, or no such target.
        StateError: umem is off.
    """
    session.require_session("advise")
    if advice not in ("read_mostly", "none"):
        raise ConfigError(f"umem.advise(..., {advice!r}): allowed: read_mostly, none")
    from ..base.native import core

    held = _held(target, "advise")
    for part in held:
        core.read_mostly(*part.span, advice == "read_mostly")
    return bool(held)


def tag(target: object, tag: str) -> bool:
    """Tag the target with its role; return False if umem holds none of it.

    `sleep`, `exclude`, reports and some policies select tensors by tag. umem finds most tags
    itself; only this call identifies a cache of keys and values. The tag lasts as long as the
    memory. Small tensors, which share pages, keep the tag pool.

    Args:
        target: as for `prefetch`; a view stands for its whole storage.
        tag: param, grad, optimizer, activation, input, workspace, temp, comm or kv_cache.

    Raises:
        ConfigError: an unknown tag, or no such target.
        StateError: umem is off.
    """
    from ..base.native import core

    session.require_session("tag")
    allowed = [name for name in core.tags() if name != "pool"]
    if tag not in allowed:
        raise ConfigError(f"umem.tag(..., {tag!r}): allowed: {', '.join(allowed)}")
    held = _held(target, "tag")
    for part in held:
        of_torch = hasattr(part.tensor, "untyped_storage")
        core.tag(part.tensor.untyped_storage().data_ptr() if of_torch else part.address, tag)
    return bool(held)


def empty_cache() -> int:
    """Give back the memory of freed tensors, on the device and on the host; return the bytes.

    umem keeps it for the next tensors: up to twice the peak of live bytes, and 64 MiB. At a step's
    end it gives back memory of the host that two whole steps had no use for, and on the CPU all of
    it once no tensor lives. On a GPU `torch.cuda.empty_cache()` does the same as this function,
    which waits for the device as that does.

    Raises:
        StateError: umem is off.
    """
    from ..base.native import core

    session.require_session("empty_cache")
    before = core.stats()["cached_bytes"]
    core.trim()
    return max(before - core.stats()["cached_bytes"], 0)


def discard(target: object) -> int:
    """Discard the target's bytes: they are undefined until they are written again.

    Only whole pages of 2 MiB that contain nothing else are discarded. The discard counts as a write
    on the current stream: a backward pass that saved the tensor raises, as after any in-place
    change.

    Args:
        target: as for `prefetch`; views must have no holes. Arrays of other frameworks give their
            stream in `__cuda_array_interface__`; the default is the legacy default stream.

    Returns:
        Bytes discarded: 0 if umem holds none of the target, or the driver cannot discard.

    Raises:
        ConfigError: a tensor that requires grad, a view with holes, a tensor without a whole page
            of its own, or no such target; nothing is discarded.
        StateError: umem is off, an op is using it, or the stream captures a graph.
    """
    from ..base.native import core

    held = _held(target, "discard")
    for part in held:
        _check_discard(part, core)
    return sum(_discard(part, core) for part in held)


def pin(target: object) -> PinHandle:
    """Bring the target to the device and keep it there: neither pressure nor plans evict it.

    Pins are counted: each needs its own `unpin` or `remove`. They end when the tensor's memory is
    freed. `umem.sleep()` suspends them.

    Args:
        target: as for `prefetch`.

    Raises:
        OutOfMemoryError: all pins together would leave too little of the budget for ops; the
            message names the largest pins, and nothing is pinned.
        ConfigError: no such target.
        StateError: umem is off.
    """
    return _hold(target, "pin", "pin")


def unpin(target: object) -> bool:
    """End the newest pin of each tensor of the target; return False if umem holds none of it.

    Raises:
        StateError: umem is off, or no pin covers exactly the bytes of one of the tensors; the pins
            of the others have ended.
        ConfigError: no such target.
    """
    from ..base.native import core

    held = _held(target, "unpin")
    missing = [part for part in held if not core.unpin(*part.span)]
    if missing:
        raise StateError(
            f"umem.unpin(...): {_label(missing[0])} of {units.format_bytes(missing[0].nbytes)} is "
            "not pinned; give the tensor, view or module that was given to umem.pin()"
        )
    return bool(held)


def keep(target: object) -> PinHandle:
    """Pin the target permanently, and make new plans around it.

    Args:
        target: as for `prefetch`; a module stands for its present parameters and buffers.

    Raises:
        As `pin`.
    """
    made = _hold(target, "pin", "keep")
    if made:
        session.replan()
    return made


def exclude(
    target: object = None,
    *,
    tag: str | None = None,
    min_bytes: str | int | None = None,
    max_bytes: str | int | None = None,
    predicate: Callable[[TensorPlacement], bool] | None = None,
) -> PinHandle:
    """Exclude tensors from policies: only `evict` and page faults move them.

    A tensor must meet all given conditions. A tag or sizes alone make a rule that also covers later
    tensors; a target or a predicate selects among existing tensors.

    Args:
        target: as for `prefetch`; None: all tensors in umem's memory.
        tag: param, grad, optimizer, activation, input, workspace, temp, comm, kv_cache, or pool
            (the pages that small tensors share).
        min_bytes: the minimum size, as "8MiB".
        max_bytes: the maximum size, as "64MiB".
        predicate: called with each tensor's `umem.where`; true selects the tensor.

    Raises:
        ConfigError: no condition, a bad value, or no such target.
        StateError: umem is off.
    """
    session.require_session("exclude")
    if target is None and predicate is None and tag is min_bytes is max_bytes is None:
        raise ConfigError(
            "umem.exclude() needs a target, tag=, min_bytes=, max_bytes= or predicate="
        )
    if predicate is not None and not callable(predicate):
        raise ConfigError(f"umem.exclude(predicate={predicate!r}): allowed: a function")
    least = _size("min_bytes", min_bytes, 0)
    most = _size("max_bytes", max_bytes, _MAX_BYTES)
    if least > most:
        raise ConfigError(
            f"umem.exclude(min_bytes={min_bytes!r}, max_bytes={max_bytes!r}): no size is in between"
        )
    from ..base.native import core

    if tag is not None and tag not in (known := core.tags()):
        raise ConfigError(f"umem.exclude(tag={tag!r}): allowed: {', '.join(known)}")
    if target is None and predicate is None:
        return PinHandle("exclude", [core.exempt_all(tag or "", least, most)])
    chosen = _chosen(target, tag, least, most, predicate)
    try:
        return PinHandle("exclude", [core.hold(chosen, "exempt", [])] if chosen else [])
    except ConfigError:
        if target is not None:
            raise
    held: list[int] = []
    try:
        for span in chosen:
            with contextlib.suppress(ConfigError):  # freed by another thread, or the predicate
                held.append(core.hold([span], "exempt", []))
    except BaseException:
        PinHandle("exclude", held).remove()
        raise
    return PinHandle("exclude", held)


def _chosen(
    target: object,
    tag: str | None,
    least: int,
    most: int,
    predicate: Callable[[TensorPlacement], bool] | None,
) -> list[tuple[int, int]]:
    """Return the byte ranges of the existing tensors that meet all conditions."""
    from .placement import tensors

    return [
        (row.address, row.bytes)
        for row in tensors(target)
        if row.held
        and (tag is None or row.tag == tag)
        and least <= row.bytes <= most
        and (predicate is None or predicate(row))
    ]


def _size(name: str, value: str | int | None, default: int) -> int:
    if value is None:
        return default
    try:
        return units.parse_bytes(str(value))
    except ValueError as error:
        raise ConfigError(
            f"umem.exclude({name}=): {error}; allowed: {units.BYTES_ALLOWED}"
        ) from None


def _held(target: object, what: str) -> list[StorageSpan]:
    """Return the parts of the target that are in umem's memory."""
    session.require_session(what)
    from ..base.native import core

    return [part for part in parts(target, what) if part.nbytes and core.owns(part.address)]


def _hold(target: object, kind: str, what: str) -> PinHandle:
    from ..base.native import core

    held = _held(target, what)
    if not held:
        return PinHandle(what, [])
    labels = [_label(part) for part in held]
    return PinHandle(what, [core.hold([part.span for part in held], kind, labels)])


def _label(part: StorageSpan) -> str:
    if part.name:
        return part.name
    tensor = part.tensor
    if not hasattr(tensor, "dtype") or not hasattr(tensor, "shape"):  # a buffer, an interface
        return kind_of(tensor)
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _check_discard(part: StorageSpan, core: Any) -> None:
    what = f"umem.discard(...): {_label(part)}"
    if getattr(part.tensor, "requires_grad", False):
        raise ConfigError(
            f"{what} requires grad, and training would lose its values; discard "
            "tensor.detach() to discard them anyway"
        )
    if not part.dense:
        raise ConfigError(f"{what} is a view with holes, and the bytes in them are not its own")
    if not core.own_pages(*part.span):
        raise ConfigError(
            f"{what} of {units.format_bytes(part.nbytes)} has no page of 2 MiB to itself: the "
            "bytes of its neighbours would be lost too"
        )


def _discard(part: StorageSpan, core: Any) -> int:
    done: int = core.discard(*part.span, stream_of(part.tensor))
    if done and hasattr(part.tensor, "untyped_storage") and not part.tensor.is_inference():
        import torch

        torch.autograd.graph.increment_version(part.tensor)
    return done
