"""Detection of blocks with equal bytes, without data, from the history of their values.

Value numbering (Alpern, Wegman, Zadeck, 1988): the same deterministic op on equal values gives
equal values. A value without such a history (a random tensor, a batch) equals no other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NewType

import torch

from ..capture.op_semantics import describe
from ..trace.ids import BlockId

# Equal numbers mean equal bytes.
ValueNumber = NewType("ValueNumber", int)
BlockOf = Callable[[torch.Tensor], BlockId]


class Values:
    """The number of the value of each block; equal numbers mean equal bytes."""

    def __init__(self) -> None:
        # By block: the event that gave it its value.
        self.since: dict[BlockId, int] = {}
        self._value: dict[BlockId, ValueNumber] = {}
        self._known: dict[Any, ValueNumber] = {}
        self._fresh = map(ValueNumber, itertools.count())

    def of(self, block: BlockId) -> ValueNumber:
        """Return the number of a block's value now, or at its end."""
        if block not in self._value:
            self._value[block] = next(self._fresh)
        return self._value[block]

    def begin(self) -> None:
        """Restart the count of events; known values count as there from its start."""
        self.since = dict.fromkeys(self.since, 0)

    def note(
        self,
        func: Any,
        arguments: tuple[Any, ...],
        written: Iterable[torch.Tensor],
        block_of: BlockOf,
        now: int,
    ) -> None:
        """Record that an op wrote tensors: results of its own, or arguments."""
        try:
            key = None if describe(func).random else (func, self._key(arguments, block_of))
            hash(key)
        except TypeError:  # an argument that cannot be compared
            key = None
        new: dict[BlockId, ValueNumber] = {}  # all are written together, from the previous values
        for index, tensor in enumerate(written):
            made = None if key is None else (key, index, *_geometry(tensor))
            if made is None:
                number = next(self._fresh)
            else:
                if made not in self._known:
                    self._known[made] = next(self._fresh)
                number = self._known[made]
            new[block_of(tensor)] = number
        self._value.update(new)
        self.since.update(dict.fromkeys(new, now))

    def _key(self, value: Any, block_of: BlockOf) -> Any:
        if isinstance(value, torch.Tensor):
            return ("tensor", self.of(block_of(value)), *_geometry(value))
        if isinstance(value, (list, tuple)):
            return tuple(self._key(item, block_of) for item in value)
        if isinstance(value, Mapping):
            return tuple((name, self._key(item, block_of)) for name, item in sorted(value.items()))
        # 1, 1.0 and True are one key of a dict, as are 0.0 and -0.0.
        return (type(value).__name__, repr(value) if isinstance(value, float) else value)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
