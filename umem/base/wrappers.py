"""Tensor subclasses that wrap other tensors, such as DTensor; without importing torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def is_wrapper(target: object) -> bool:
    """Return whether the object is such a tensor."""
    return hasattr(target, "__tensor_flatten__")


def inner_tensors(wrapper: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a wrapper that are tensors; since torch 2.14 some are not."""
    for name in wrapper.__tensor_flatten__()[0]:
        value = getattr(wrapper, name)
        if hasattr(value, "untyped_storage"):
            yield name, value
