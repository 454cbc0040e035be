"""A hook in the function of torch in which all grouping of tensor lists ends.

Its code is replaced, and not the function: other modules of torch have it by name. Nor the C++
function that it calls: Dynamo knows that one by identity, from tables that it fills when it is
imported, when it first compiles, and again once a process group is made; what stands in its place
then is what is known, and torch's own is not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._foreach_utils

from .list_parts import Groups, Lists

Split = Callable[[Groups], Groups]

_function: Any = inspect.unwrap(torch.utils._foreach_utils._group_tensors_by_device_and_dtype)
_own: Any = _function.__code__
_splits: list[Split] = []


def add(split: Split) -> None:
    """Let torch have what `split` makes of the groups of a list, until `remove`; the last counts.

    Compiled code has the groups as they are.
    """
    _splits.append(split)
    _function.__code__ = _grouped.__code__


def remove(split: Split) -> None:
    """End an `add`; after the last one torch has its own code again."""
    _splits.remove(split)
    if not _splits:
        _function.__code__ = _own


def split_last(groups: Groups) -> Groups:
    """Return what the split that was added last makes of the groups."""
    return _splits[-1](groups) if _splits else groups


def _grouped(tensorlistlist: Lists, with_indices: bool = False) -> Groups:
    groups: Groups = torch._C._group_tensors_by_device_and_dtype(tensorlistlist, with_indices)
    if torch.compiler.is_compiling():
        return groups
    from umem.capture.grouping import split_last  # it has torch's names, and not this module's

    return split_last(groups)
