"""Conversion of the native recorder's columns to events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .ids import Address, BlockId
from .schema import Alloc, Event, Free, Op, Step

if TYPE_CHECKING:
    from ..base.native import core

_ALLOC, _OP, _FREE, _STEP = range(4)


def events(recorded: core.Recorded) -> Iterator[Event]:
    """Yield the events in the columns of `core.record_take`, in order.

    Blocks that were live at the start come first, as allocations.
    """
    kind = recorded["kind"].tolist()
    ids: list[BlockId] = recorded["id"].tolist()
    sizes = recorded["bytes"].tolist()
    us = recorded["us"].tolist()
    reads = recorded["reads"].tolist()
    writes = recorded["writes"].tolist()
    accesses: list[BlockId] = recorded["accesses"].tolist()
    devices = recorded["device"].tolist()
    names, families = recorded["name"], recorded["family"]
    parts = zip(*(recorded[key].tolist() for key in ("part_access", "begin", "end")), strict=True)
    part = next(parts, None)
    at = 0
    for i, what in enumerate(kind):
        if what == _ALLOC:
            yield Alloc(ids[i], sizes[i], names[i], families[i], devices[i])
        elif what == _FREE:
            yield Free(ids[i])
        elif what == _STEP:
            yield Step()
        else:
            middle = at + reads[i]
            end = middle + writes[i]
            time = us[i] if us[i] >= 0 else None
            rows: list[int] = []
            while part is not None and part[0] < end:
                rows += part[0] - at, part[1], part[2]
                part = next(parts, None)
            yield Op(
                names[i], tuple(accesses[at:middle]), tuple(accesses[middle:end]), time,
                family=families[i], parts=tuple(rows),
            )  # fmt: skip
            at = end


def addresses(recorded: core.Recorded) -> dict[BlockId, Address]:
    """Return the address of every block by its id."""
    made = recorded["kind"] == _ALLOC
    ids, places = recorded["id"][made].tolist(), recorded["address"][made].tolist()
    return dict(zip(ids, places, strict=True))
