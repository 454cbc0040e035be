"""Hints: what a program tells umem about tensors of its own. docs/hints.md describes them.

A wrong hint costs time, never data; `discard` alone gives bytes up, and takes only its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import runtime, units
from .errors import ConfigError, StateError
from .targets import Part, parts, stream_of

if TYPE_CHECKING:
    from .whereabouts import Where

_MOST_BYTES = (1 << 63) - 1


class Hold:
    """What `pin`, `keep` and `exclude` put in force, until `remove`; also a context manager.

    False where umem holds none of the tensors, so that nothing is in force.
    """

    def __init__(self, what: str, numbers: list[int]) -> None:
        self._what = what
        self._numbers = numbers

    def __repr__(self) -> str:
        return f"<umem.{self._what}: {'in force' if self._numbers else 'nothing'}>"

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """End it. What ended before (freed tensors, `unpin`, `umem.disable()`) is no error."""
        if not self._numbers:
            return
        from .native import core

        numbers, self._numbers = self._numbers, []
        for number in numbers:
            core.unhold(number)


def prefetch(target: object) -> bool:
    """Bring the target to the device; False when umem holds none of it.

    Args:
        target: a tensor or view, a module (its parameters and buffers), or a list, tuple or
            mapping of them. What shares a page or a piece of 64 MiB with it moves too.

    Raises:
        OutOfMemoryError: there is no room for all of it; as much as fits has come.
        ConfigError: no such target.
        StateError: umem is off.
    """
    from .native import core

    held = _held(target, "prefetch")
    core.prefetch([part.span for part in held])
    return bool(held)


def evict(target: object) -> bool:
    """Send the target to the host; False when umem holds none of it.

    Args:
        target: as for `prefetch`.

    Raises:
        StateError: umem is off, or some of it is pinned or in use by a running op; nothing is
            moved then.
        OutOfMemoryError: the host budget has no room.
        ConfigError: no such target.
    """
    from .native import core

    held = _held(target, "evict")
    core.evict([part.span for part in held])
    return bool(held)


def advise(target: object, advice: str) -> bool:
    """Say how the target is used; False when umem holds none of it.

    Args:
        target: as for `prefetch`.
        advice: "read_mostly": keep what is read on both sides, so that evicting it again costs no
            transfer; a write ends that until it is read again. "none": no longer.

    Raises:
        ConfigError: unknown advice, or no such target.
        StateError: umem is off.
    """
    runtime.require_session("advise")
    if advice not in ("read_mostly", "none"):
        raise ConfigError(f"umem.advise(..., {advice!r}): allowed: read_mostly, none")
    from .native import core

    held = _held(target, "advise")
    for part in held:
        core.read_mostly(*part.span, advice == "read_mostly")
    return bool(held)


def tag(target: object, tag: str) -> bool:
    """Say what the target is for; False when umem holds none of it.

    `sleep`, `exclude` and reports go by tags, and so do policies that tell weights from the rest.
    umem finds most by itself; a cache of keys and values is known by this call only. It lasts as
    long as the memory; small tensors, which share pages, keep the tag pool.

    Args:
        target: as for `prefetch`; of a view, its whole storage.
        tag: param, grad, optimizer, activation, input, workspace, temp, comm or kv_cache.

    Raises:
        ConfigError: an unknown tag, or no such target.
        StateError: umem is off.
    """
    from .native import core

    runtime.require_session("tag")
    allowed = [name for name in core.tags() if name != "pool"]
    if tag not in allowed:
        raise ConfigError(f"umem.tag(..., {tag!r}): allowed: {', '.join(allowed)}")
    held = _held(target, "tag")
    for part in held:
        of_torch = hasattr(part.tensor, "untyped_storage")
        core.tag(part.tensor.untyped_storage().data_ptr() if of_torch else part.address, tag)
    return bool(held)


def discard(target: object) -> int:
    """Let the target's bytes go: they mean nothing until they are written again.

    Only whole pages of 2 MiB that hold nothing else are let go. In the order of the program, it
    is a write on the current stream: a backward pass that saved the tensor raises as after any
    change in place.

    Args:
        target: as for `prefetch`; of views, those without holes. Arrays of other frameworks say
            their stream in `__cuda_array_interface__`; without one it is the legacy default stream.

    Returns:
        Bytes let go: 0 where umem holds none of it, or the driver cannot discard.

    Raises:
        ConfigError: a tensor that requires grad, a view with holes, a tensor without a whole page
            of its own, or no such target; nothing is discarded then.
        StateError: umem is off, an op is using it, or the stream captures a graph.
    """
    from .native import core

    held = _held(target, "discard")
    for part in held:
        _check_discard(part, core)
    return sum(_discard(part, core) for part in held)


def pin(target: object) -> Hold:
    """Bring the target to the device and keep it there: neither pressure nor plans evict it.

    Pins count: as many `unpin` or `remove` end it. They end with the tensor's memory. A
    `umem.sleep()` suspends them.

    Args:
        target: as for `prefetch`.

    Raises:
        OutOfMemoryError: with all that is pinned the budget would not have its reserve for ops;
            the message names the largest pins. Nothing is pinned then.
        ConfigError: no such target.
        StateError: umem is off.
    """
    return _hold(target, "pin", "pin")


def unpin(target: object) -> bool:
    """End the newest pin of each tensor of the target; False when umem holds none of it.

    Raises:
        StateError: umem is off, or one of them was not pinned by just these bytes.
        ConfigError: no such target.
    """
    from .native import core

    held = _held(target, "unpin")
    missing = [part for part in held if not core.unpin(*part.span)]
    if missing:
        raise StateError(
            f"umem.unpin(...): {_label(missing[0])} of {units.format_bytes(missing[0].nbytes)} is "
            "not pinned; give the tensor, view or module that was given to umem.pin()"
        )
    return bool(held)


def keep(target: object) -> Hold:
    """Pin the target for good, and let plans be made around it.

    Args:
        target: as for `prefetch`; of a module the parameters and buffers that it has now.

    Raises:
        As `pin`.
    """
    made = _hold(target, "pin", "keep")
    if made:
        runtime.replan()
    return made


def exclude(
    target: object = None,
    *,
    tag: str | None = None,
    min_bytes: str | int | None = None,
    max_bytes: str | int | None = None,
    predicate: Callable[[Where], bool] | None = None,
) -> Hold:
    """Let policies leave tensors where they are: they are evicted by `evict` and page faults only.

    All that is given has to hold. With a tag or sizes alone it is a rule, also for tensors to
    come; a target or a predicate chooses among those that there are now.

    Args:
        target: as for `prefetch`; None: all tensors of umem.
        tag: param, grad, optimizer, activation, input, workspace, temp, comm, kv_cache, or pool:
            the pages that small tensors share.
        min_bytes: the smallest, as "8MiB".
        max_bytes: the largest.
        predicate: is asked of each what `umem.where` says.

    Raises:
        ConfigError: nothing is given, a bad value, or no such target.
        StateError: umem is off.
    """
    runtime.require_session("exclude")
    if target is None and predicate is None and tag is min_bytes is max_bytes is None:
        raise ConfigError(
            "umem.exclude() needs a target, tag=, min_bytes=, max_bytes= or predicate="
        )
    least = _size("min_bytes", min_bytes, 0)
    most = _size("max_bytes", max_bytes, _MOST_BYTES)
    if least > most:
        raise ConfigError(
            f"umem.exclude(min_bytes={min_bytes!r}, max_bytes={max_bytes!r}): no size"
        )
    from .native import core
    from .whereabouts import TAGS

    if tag is not None and tag not in TAGS:
        raise ConfigError(f"umem.exclude(tag={tag!r}): allowed: {', '.join(TAGS)}")
    if target is None and predicate is None:
        return Hold("exclude", [core.exempt_all(tag or "", least, most)])
    chosen = _chosen(target, tag, least, most, predicate)
    return Hold("exclude", [core.hold(chosen, "exempt", [])] if chosen else [])


def _chosen(
    target: object,
    tag: str | None,
    least: int,
    most: int,
    predicate: Callable[[Where], bool] | None,
) -> list[tuple[int, int]]:
    """The bytes of the tensors that there are now and that all holds of."""
    from .whereabouts import tensors

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


def _held(target: object, what: str) -> list[Part]:
    """The parts of the target that lie in umem's memory."""
    runtime.require_session(what)
    from .native import core

    return [part for part in parts(target, what) if part.nbytes and core.owns(part.address)]


def _hold(target: object, kind: str, what: str) -> Hold:
    from .native import core

    held = _held(target, what)
    if not held:
        return Hold(what, [])
    labels = [_label(part) for part in held]
    return Hold(what, [core.hold([part.span for part in held], kind, labels)])


def _label(part: Part) -> str:
    if part.name:
        return part.name
    tensor = part.tensor
    if not hasattr(tensor, "dtype") or not hasattr(tensor, "shape"):  # a buffer, a bare interface
        return f"a {type(tensor).__name__}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _check_discard(part: Part, core: Any) -> None:
    what = f"umem.discard(...): {_label(part)}"
    if getattr(part.tensor, "requires_grad", False):
        raise ConfigError(
            f"{what} requires grad, and its values would be lost to training; discard "
            "tensor.detach() if they are to go"
        )
    if not part.dense:
        raise ConfigError(f"{what} is a view with holes, and what lies in them is not its own")
    if not core.own_pages(*part.span):
        raise ConfigError(
            f"{what} of {units.format_bytes(part.nbytes)} has no page of 2 MiB to itself: its "
            "neighbours' bytes would go with it"
        )


def _discard(part: Part, core: Any) -> int:
    if not hasattr(part.tensor, "untyped_storage"):
        return int(core.discard(*part.span, stream_of(part.tensor)))
    import torch

    stream = 0
    if part.tensor.device.type == "cuda":
        stream = torch.cuda.current_stream(part.tensor.device).cuda_stream
    done: int = core.discard(*part.span, stream)
    if not part.tensor.is_inference():
        torch.autograd.graph.increment_version(part.tensor)
    return done
