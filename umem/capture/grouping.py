"""A hook in the torch function through which every grouping of tensor lists passes.

The hook replaces the code of that Python function, because no function object can be replaced for
all callers: other modules of torch import it by name, and so may programs. Dynamo knows the C++
function that it calls by identity, from tables filled when Dynamo is imported, at its first
compilation, and once more after a process group is made. A replacement present at one of these
times would be in the tables instead of torch's own function.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._foreach_utils

from .list_parts import Groups, Lists

Split = Callable[[Groups], Groups]

_function: Any = inspect.unwrap(torch.utils._foreach_utils._group_tensors_by_device_and_dtype)
_own: Any = _function.__code__
_splits: list[Split] = []


def add(split: Split) -> None:
    """Give torch the result of `split` for the groups of a list, until `remove`.

    The split added last is used. Compiled code gets the groups unchanged.
    """
    _splits.append(split)
    _function.__code__ = _grouped.__code__


def remove(split: Split) -> None:
    """Undo an `add`; torch gets its own code back after the last one."""
    _splits.remove(split)
    if not _splits:
        _function.__code__ = _own


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Leave lists whole within the context."""
    add(_unchanged)
    try:
        yield
    finally:
        remove(_unchanged)


def split_last(groups: Groups) -> Groups:
    """Return the result of the split added last."""
    return _splits[-1](groups) if _splits else groups


def _unchanged(groups: Groups) -> Groups:
    return groups


def _grouped(tensorlistlist: Lists, with_indices: bool = False) -> Groups:
    groups: Groups = torch._C._group_tensors_by_device_and_dtype(tensorlistlist, with_indices)
    if torch.compiler.is_compiling():
        return groups
    from umem.capture.grouping import split_last  # it has torch's names, and not this module's

    return split_last(groups)
