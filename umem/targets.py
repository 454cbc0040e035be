"""What a hint is about: the tensors of a target, and the bytes that each of them can touch.

torch is not imported here: a tensor is what has a storage, a module what has parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .errors import ConfigError

ALLOWED = (
    "a tensor, a module, an array with __cuda_array_interface__, a umem.Buffer, a buffer of "
    "cuda.core, or a list, tuple or mapping of them"
)
_INTERFACES = ("__cuda_array_interface__", "__array_interface__")


class Part(NamedTuple):
    """A tensor's bytes: all from its first element to its last, and so what lies between."""

    name: str
    tensor: Any
    address: int  # 0: it has no bytes here (empty, freed, meta or fake)
    nbytes: int
    dense: bool  # every byte in between is the tensor's own

    @property
    def span(self) -> tuple[int, int]:
        """(address, bytes)."""
        return self.address, self.nbytes


def parts(target: object, what: str) -> list[Part]:
    """The parts of `target`, one for each tensor, shared ones once.

    Args:
        target: a tensor, a module (parameters and buffers), or a list, tuple or mapping of them.
        what: the caller, for messages.

    Raises:
        ConfigError: something in it is none of these, or a tensor without strides.
    """
    found: dict[tuple[int, int, bool], Part] = {}
    for name, tensor in _named(target, "", what):
        part = _part(name, tensor, what)
        # Those without bytes are told apart by themselves: none hides another.
        key = (part.address or id(tensor), part.nbytes, part.dense)
        found.setdefault(key, part)
    return list(found.values())


def is_module(target: object) -> bool:
    """Whether it is like a torch.nn.Module."""
    return hasattr(target, "named_parameters") and hasattr(target, "named_buffers")


def _named(target: Any, name: str, what: str) -> Iterator[tuple[str, Any]]:
    if hasattr(target, "untyped_storage") and not hasattr(target, "__tensor_flatten__"):
        yield name, target
        return
    if _span(target) is not None:
        yield name, target
        return
    for key, value in _members(target, what):
        yield from _named(value, f"{name}.{key}" if name else key, what)


def _members(target: Any, what: str) -> Iterator[tuple[str, Any]]:
    if isinstance(target, Mapping):
        return ((str(key), value) for key, value in target.items())
    if is_module(target):
        return itertools.chain(target.named_parameters(), target.named_buffers())
    if hasattr(target, "__tensor_flatten__"):  # a wrapper around tensors, as DTensor
        return ((key, getattr(target, key)) for key in target.__tensor_flatten__()[0])
    if isinstance(target, Iterable) and not isinstance(target, (str, bytes)):
        return ((str(i), value) for i, value in enumerate(target))
    kind = type(target).__name__
    raise ConfigError(f"umem.{what}(...) was given a {kind}; allowed: {ALLOWED}")


def _part(name: str, tensor: Any, what: str) -> Part:
    nothing = Part(name, tensor, 0, 0, True)
    if not hasattr(tensor, "untyped_storage"):
        address, nbytes, dense = _span(tensor) or (0, 0, True)
        return Part(name, tensor, address, nbytes, dense) if nbytes else nothing
    if getattr(tensor, "is_meta", False):
        return nothing
    try:
        storage = tensor.untyped_storage()
        first, limit = storage.data_ptr(), storage.nbytes()
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        offset, size = tensor.storage_offset(), tensor.element_size()
    except (RuntimeError, NotImplementedError) as error:
        if "fake" in type(tensor).__name__.lower():
            return nothing
        layout = getattr(tensor, "layout", "unknown")
        raise ConfigError(
            f"umem.{what}(...): a tensor of layout {layout} has no storage of its own; give the "
            "tensors that it is made of, as values() and indices()"
        ) from error
    if first == 0 or 0 in shape:
        return nothing
    elements, dense = _extent(shape, strides)
    # A storage that was freed or shrunk under its tensor has fewer bytes than those ask for.
    begin = min(offset * size, limit)
    nbytes = min(begin + elements * size, limit) - begin
    if nbytes == 0:
        return nothing
    return Part(name, tensor, first + begin, nbytes, dense)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, bool]:
    """Elements from the first to the last, and whether each of those in between is one."""
    extent, dense = 1, True
    for stride, n in sorted(zip(strides, shape, strict=True)):
        dense = dense and (stride <= extent or n == 1)
        extent += (n - 1) * stride
    return extent, dense


def _span(array: Any) -> tuple[int, int, bool] | None:
    """(address, bytes, dense) of an array or a buffer of another framework; None: it is neither."""
    for name in _INTERFACES:
        if (interface := getattr(array, name, None)) is not None:
            return _span_of(interface)
    if hasattr(array, "handle") and hasattr(array, "size"):  # cuda.core's Buffer
        return int(array.handle), int(array.size), True
    return None


def stream_of(array: Any) -> int:
    """The stream that an array of another framework says it is used on; 0, the legacy default."""
    stream = (getattr(array, "__cuda_array_interface__", None) or {}).get("stream")
    return 0 if stream in (None, 1) else int(stream)  # 1 is the legacy default there


def _span_of(interface: dict[str, Any]) -> tuple[int, int, bool]:
    item = int("".join(filter(str.isdigit, interface["typestr"])))
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    first = interface["data"][0]
    if 0 in shape:
        return first, 0, True
    if strides is None:
        return first, item * math.prod(shape), True
    before = sum((n - 1) * step for n, step in zip(shape, strides, strict=True) if step < 0)
    extent, dense = item, True
    for step, n in sorted((abs(step), n) for step, n in zip(strides, shape, strict=True)):
        dense = dense and (step <= extent or n == 1)
        extent += (n - 1) * step
    return first + before, extent, dense
