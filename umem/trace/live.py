"""What the native recorder took down, as events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .schema import Alloc, Event, Free, Op, Step

if TYPE_CHECKING:
    from .._core import Recorded

_ALLOC, _OP, _FREE, _STEP = range(4)


def events(recorded: Recorded) -> Iterator[Event]:
    """The columns of `core.record_take`, in their order.

    Blocks that were alive before come first, as allocations.
    """
    kind = recorded["kind"].tolist()
    ids = recorded["id"].tolist()
    sizes = recorded["bytes"].tolist()
    us = recorded["us"].tolist()
    reads = recorded["reads"].tolist()
    writes = recorded["writes"].tolist()
    accesses = recorded["accesses"].tolist()
    names, families = recorded["name"], recorded["family"]
    at = 0
    for i, what in enumerate(kind):
        if what == _ALLOC:
            yield Alloc(ids[i], sizes[i], names[i], families[i])
        elif what == _FREE:
            yield Free(ids[i])
        elif what == _STEP:
            yield Step()
        else:
            middle = at + reads[i]
            end = middle + writes[i]
            time = us[i] if us[i] >= 0 else None
            yield Op(
                names[i], tuple(accesses[at:middle]), tuple(accesses[middle:end]), time,
                family=families[i],
            )  # fmt: skip
            at = end


def addresses(recorded: Recorded) -> dict[int, int]:
    """The address of every block, by its id."""
    made = recorded["kind"] == _ALLOC
    ids, places = recorded["id"][made].tolist(), recorded["address"][made].tolist()
    return dict(zip(ids, places, strict=True))
