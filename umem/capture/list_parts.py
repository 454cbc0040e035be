"""Lists of tensors for foreach and fused ops, in parts of a size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Key = tuple[torch.device, torch.dtype]
Lists: TypeAlias = "list[list[Tensor | None]]"  # as text: the site reads modules without torch
Group = tuple[Lists, list[int]]  # and the indices of its rows in the grouped lists
Groups = dict[Key, Group]


def in_parts(groups: Groups, most: Callable[[torch.device], int]) -> Groups:
    """Return torch's groups of lists such that a walk over them finds them in parts.

    Args:
        groups: the result of `torch._C._group_tensors_by_device_and_dtype`.
        most: the bytes of a part on a device; 0: there are no parts.
    """
    found = {key: list(parts(group, most(key[0]))) for key, group in groups.items()}
    return _InParts(groups, found) if any(len(each) > 1 for each in found.values()) else groups


def parts(group: Group, most: int) -> Iterator[Group]:
    """Yield rows of the lists, in order, with tensors of at most `most` bytes, or a single row.

    A list may also be empty, as for a state that the optimizer does not keep.

    Args:
        most: 0: all of them at once.
    """
    lists, indices = group
    begin = taken = 0
    for row, bytes_ in enumerate(row_bytes(lists)):
        if row > begin and taken + bytes_ > most > 0:
            yield [each[begin:row] for each in lists], indices[begin:row]
            begin, taken = row, 0
        taken += bytes_
    yield [each[begin:] for each in lists], indices[begin:]


def row_bytes(lists: Sequence[Sequence[Tensor | None]]) -> Iterator[int]:
    """Yield the bytes of each row's tensors on this process's device."""
    for row in zip(*(each for each in lists if each), strict=True):
        here = [getattr(tensor, "_local_tensor", tensor) for tensor in row if tensor is not None]
        yield sum(tensor.numel() * tensor.element_size() for tensor in here)


def have_shared_rows(groups: Groups) -> bool:
    """Return whether some memory is in two rows of a group.

    Weights tied by `.data` are an example: the order of ops on them makes a difference.
    """
    return any(
        overlaps(
            (row, tensor) for each in lists for row, tensor in enumerate(each) if tensor is not None
        )
        for lists, _ in groups.values()
    )


def overlaps(tensors: Iterable[tuple[int, Tensor]]) -> set[int]:
    """Return the numbers of tensors that share memory with one of another number."""
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + _span(t) * t.element_size(), number)
        for number, t in ((number, getattr(t, "_local_tensor", t)) for number, t in tensors)
        if t.numel() and t.layout == torch.strided and t.data_ptr()  # wrappers have no memory
    )
    found: set[int] = set()
    end, last = 0, 0
    for start, stop, number in spans:
        if start < end and number != last:
            found |= {last, number}
        if stop > end:
            end, last = stop, number
    return found


def _span(tensor: Tensor) -> int:
    """Return the elements from the first to the last of a tensor that is not empty."""
    shape, strides = tensor.shape, tensor.stride()
    return 1 + sum((n - 1) * abs(stride) for n, stride in zip(shape, strides, strict=True))


class _InParts(dict[Key, Group]):
    """Groups whose `items` and `values`, which torch iterates over, yield the parts."""

    def __init__(self, groups: dict[Key, Group], parts_of: dict[Key, list[Group]]) -> None:
        super().__init__(groups)
        self._parts = parts_of

    def items(self) -> Iterator[tuple[Key, Group]]:  # type: ignore[override]
        for key in self:
            for part in self._parts[key]:
                yield key, part

    def values(self) -> Iterator[Group]:  # type: ignore[override]
        for _, part in self.items():
            yield part
