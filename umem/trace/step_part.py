"""The events of one step, and the blocks in them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..base.units import PAGE_BYTES
from ..errors import TraceError
from .event_columns import ALLOC, FREE, OP, EventColumns
from .step_trace import Bools, Ints

SMALL_BYTES = 256  # sizes of small tensors are rounded up to a multiple


def device_bytes(count: int) -> int:
    """Return the bytes that a tensor of `count` bytes takes: whole pages if it is at least one."""
    unit = PAGE_BYTES if count >= PAGE_BYTES else SMALL_BYTES
    return -(-count // unit) * unit


def on_device(asked: Ints) -> tuple[Ints, Bools]:
    """Return `device_bytes` of many tensors, and which of them are large."""
    large = asked >= PAGE_BYTES
    unit = np.where(large, PAGE_BYTES, SMALL_BYTES)
    return -(-asked // unit) * unit, large


class Blocks:
    """The blocks of some events, numbered in the order of their allocations.

    Raises:
        TraceError: a block is allocated twice, or freed and not live.
    """

    def __init__(self, events: EventColumns) -> None:
        self.allocated = np.flatnonzero(events.kind == ALLOC)  # the row, of each block
        ids = events.id[self.allocated]
        self._order = np.lexsort((self.allocated, ids))
        self._known, first = np.unique(ids[self._order], return_index=True)
        self._first = np.append(first, len(ids))
        self._rows = len(events)
        # A number for each id and row, ascending: rows of different ids do not mix.
        of_id = np.repeat(np.arange(len(first)), np.diff(self._first))
        self._keys = of_id * self._rows + self.allocated[self._order]
        frees = np.flatnonzero(events.kind == FREE)
        freed = self.find(events.id[frees], frees)
        self.freed = np.full(len(ids), self._rows)  # the row, of each block; `rows`: it is not
        np.minimum.at(self.freed, freed[freed >= 0], frees[freed >= 0])
        self._check(events, frees, freed)

    def find(self, ids: Ints, rows: Ints) -> Ints:
        """Return the block that each id names at a row; -1 if it was not allocated before."""
        if not len(self._known):
            return np.full(len(ids), -1)
        of_id = np.minimum(np.searchsorted(self._known, ids), len(self._known) - 1)
        place = np.searchsorted(self._keys, of_id * self._rows + rows) - 1
        found = (self._known[of_id] == ids) & (place >= self._first[of_id])
        return np.where(found, self._order[place], -1)

    def _check(self, events: EventColumns, frees: Ints, freed: Ints) -> None:
        known = freed >= 0
        known[known] = self.freed[freed[known]] == frees[known]
        lost = frees[~known]
        # Two blocks with the same id, the second allocated while the first is live.
        again = self._order[1:][np.diff(self._keys // max(self._rows, 1)) == 0]
        before = self._order[:-1][np.diff(self._keys // max(self._rows, 1)) == 0]
        twice = self.allocated[again[self.freed[before] > self.allocated[again]]]
        if len(twice) and (not len(lost) or twice.min() < lost.min()):
            block = events.id[twice.min()]
            raise TraceError(f"id {block} is allocated twice without a free between")
        if len(lost):
            raise TraceError(f"free of id {events.id[lost.min()]}, which is not live")


@dataclass(frozen=True, eq=False)
class Part:
    """The events from one `Step` to the next, after the allocations of the blocks live there."""

    number: int
    events: EventColumns
    live: int  # number of first rows that are allocations before the part
    step: Ints  # [live] the number of the part that each is of
    ordinal: Ints  # [live] its number among the allocations of that part
    after_ops: bool  # the part before had ops, so ordinals can be compared

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of the events.

        Raises:
            TraceError: a block is allocated twice, or freed and not live.
        """
        return Blocks(self.events)

    @property
    def has_ops(self) -> bool:
        """True if there are ops in it."""
        return bool((self.events.kind == OP).any())

    def with_new(self, values: Ints, new: int | Ints) -> Ints:
        """Return the values of the live blocks, followed by those of the part's own."""
        count = len(self.blocks.allocated) - self.live
        return np.concatenate((values, np.broadcast_to(new, count)))

    @property
    def ordinals(self) -> Ints:
        """The number of each block among the allocations of its part."""
        return self.with_new(self.ordinal, np.arange(len(self.blocks.allocated) - self.live))

    def following(self) -> Part:
        """Return the part after this one, which has no events yet."""
        left = np.flatnonzero(self.blocks.freed == len(self.events))
        return Part(
            self.number + 1,
            self.events.take(self.blocks.allocated[left]),
            len(left),
            self.with_new(self.step, self.number)[left],
            self.ordinals[left],
            self.has_ops,
        )

    def peak(self, begin: int) -> tuple[int, int]:
        """Return the peak of live bytes on the device, which are `begin` first, and the last."""
        blocks, change = self.blocks, np.zeros(len(self.events) + 1, np.int64)
        size = on_device(self.events.bytes[blocks.allocated])[0]
        change[blocks.allocated] = size
        change[: self.live] = 0
        change[blocks.freed] -= size
        change[-1] = 0
        bytes_live = begin + np.cumsum(change)
        return int(bytes_live.max()), int(bytes_live[-1])
