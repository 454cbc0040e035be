"""Storage spans: the tensors of a hint's target and the bytes that each can touch.

This module does not import torch: an object with a storage is a tensor, and one with parameters and
buffers is a module.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..base.wrappers import inner_tensors, is_wrapper
from ..errors import ConfigError, kind_of

ALLOWED = (
    "a tensor, a module, an array with __cuda_array_interface__, a umem.Buffer, a buffer of "
    "cuda.core, or a list, tuple or mapping of them"
)
_INTERFACES = ("__cuda_array_interface__", "__array_interface__")


class StorageSpan(NamedTuple):
    """The bytes of a tensor from its first element to its last, including the holes."""

    name: str
    tensor: Any
    address: int  # 0: without bytes in memory (empty, freed, meta or fake)
    nbytes: int
    dense: bool  # every byte in between belongs to the tensor

    @property
    def span(self) -> tuple[int, int]:
        """The address and the number of bytes."""
        return self.address, self.nbytes


def parts(target: object, what: str) -> list[StorageSpan]:
    """Return the parts of `target`, one for each tensor; shared tensors appear once.

    Args:
        target: a tensor, a module (parameters and buffers), or a list, tuple or mapping of them.
        what: the name of the calling function, for messages.

    Raises:
        ConfigError: the target contains another object, or a tensor without strides.
    """
    found: dict[tuple[int, int, bool], StorageSpan] = {}
    for name, tensor in _named(target, "", what):
        part = _part(name, tensor, what)
        # Tensors without bytes are distinguished by identity, so that none hides another.
        key = (part.address or id(tensor), part.nbytes, part.dense)
        found.setdefault(key, part)
    return list(found.values())


def tensors_in(target: object, what: str) -> list[Any]:
    """Return the tensors in `target` without reading their addresses.

    Args:
        target: as for `parts`.
        what: the name of the calling function, for messages.

    Raises:
        ConfigError: the target contains an object that is not a tensor.
    """
    return [tensor for _, tensor in _named(target, "", what)]


def is_module(target: object) -> bool:
    """Return whether the target is like a torch.nn.Module."""
    return (
        not isinstance(target, type)
        and hasattr(target, "named_parameters")
        and hasattr(target, "named_buffers")
    )


def _named(target: Any, name: str, what: str) -> Iterator[tuple[str, Any]]:
    if hasattr(target, "untyped_storage") and not is_wrapper(target):
        yield name, target
        return
    if not is_module(target) and not is_wrapper(target) and _span(target) is not None:
        yield name, target
        return
    for key, value in _members(target, name, what):
        yield from _named(value, f"{name}.{key}" if name else key, what)


def _members(target: Any, name: str, what: str) -> Iterator[tuple[str, Any]]:
    if isinstance(target, Mapping):
        # The text of a tensor, which is a key of an optimizer's states, is all of its values.
        return (
            (str(i) if hasattr(key, "untyped_storage") else str(key), value)
            for i, (key, value) in enumerate(target.items())
        )
    if is_module(target):
        return itertools.chain(target.named_parameters(), target.named_buffers())
    if is_wrapper(target):
        return inner_tensors(target)
    if isinstance(target, Iterable) and not isinstance(target, (str, bytes)):
        return ((str(i), value) for i, value in enumerate(target))
    raise ConfigError(
        f"umem.{what}(...) was given {kind_of(target)}{_at(name)}; allowed: {ALLOWED}"
    )


def _at(name: str) -> str:
    """Return where in the target an object is, for messages."""
    return f" at {name}" if name else ""


def _part(name: str, tensor: Any, what: str) -> StorageSpan:
    nothing = StorageSpan(name, tensor, 0, 0, True)
    if not hasattr(tensor, "untyped_storage"):
        address, nbytes, dense = _span(tensor) or (0, 0, True)
        return StorageSpan(name, tensor, address, nbytes, dense) if nbytes else nothing
    fake = any(base.__name__ == "FakeTensor" for base in type(tensor).__mro__)
    if fake or getattr(tensor, "is_meta", False):
        return nothing  # torch warns of a question for a fake tensor's address
    try:
        storage = tensor.untyped_storage()
        first, limit = storage.data_ptr(), storage.nbytes()
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        offset, size = tensor.storage_offset(), tensor.element_size()
    except ValueError:  # of a lazy module, without a shape yet
        return nothing
    except (RuntimeError, NotImplementedError) as error:
        layout = getattr(tensor, "layout", "unknown")
        raise ConfigError(
            f"umem.{what}(...): a tensor of layout {layout}{_at(name)} has no storage of its own; "
            "pass the tensors that it consists of, such as values() and indices()"
        ) from error
    if first == 0 or 0 in shape:
        return nothing
    elements, dense = _extent(shape, strides)
    # A storage that was freed or shrunk has fewer bytes than its tensor needs.
    begin = min(offset * size, limit)
    nbytes = min(begin + elements * size, limit) - begin
    if nbytes == 0:
        return nothing
    return StorageSpan(name, tensor, first + begin, nbytes, dense)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, bool]:
    """Return the number of elements from first to last, and whether there are no holes."""
    extent, dense = 1, True
    for stride, n in sorted(zip(strides, shape, strict=True)):
        dense = dense and (stride <= extent or n == 1)
        extent += (n - 1) * stride
    return extent, dense


def _span(array: Any) -> tuple[int, int, bool] | None:
    """Return (address, bytes, dense) of another framework's array or buffer; None for others."""
    if (own := getattr(array, "__umem_span__", None)) is not None:  # umem.Buffer
        address, nbytes, _ = own()
        return address, nbytes, True
    for name in _INTERFACES:
        if (interface := getattr(array, name, None)) is not None:
            return _span_of(interface)
    if hasattr(array, "handle") and hasattr(array, "size"):  # cuda.core's Buffer
        return int(array.handle), int(array.size), True
    return None


def stream_of(array: Any) -> int:
    """Return the stream that work on a tensor or an array is queued on.

    It is torch's current one, or the one that an array names; 0, the legacy default stream, if that
    names none.
    """
    if hasattr(array, "untyped_storage"):
        if array.device.type != "cuda":
            return 0
        import torch

        return int(torch.cuda.current_stream(array.device).cuda_stream)
    if (own := getattr(array, "__umem_span__", None)) is not None:
        return int(own()[2])
    stream = (getattr(array, "__cuda_array_interface__", None) or {}).get("stream")
    return 0 if stream in (None, 1) else int(stream)  # 1 stands for the legacy default stream


def _span_of(interface: dict[str, Any]) -> tuple[int, int, bool] | None:
    kind, count = interface["typestr"][1], re.match(r"\d+", interface["typestr"][2:])
    if count is None:  # an array of objects, which are looked at one by one
        return None
    item = int(count[0]) * (4 if kind == "U" else 1)  # U counts characters
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
