"""Events in the columns of the native recorder, as objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from umem.base.native import core
from umem.trace.event_columns import ALLOC, FREE, OP, EventColumns
from umem.trace.ids import Address, BlockId
from umem.trace.schema import Alloc, Event, Free, Op, Step


def taken(recorded: core.Recorded) -> list[Event]:
    """Return the events in the columns of `core.record_take`."""
    return list(events(EventColumns.of_native(recorded)))


def ops_of(work: Callable[[], object]) -> list[Op]:
    """Return the operators of all threads that umem hears of in a call; it may write no trace."""
    core.record_start("file")  # plans leave out those of helper threads
    try:
        work()
        return [event for event in taken(core.record_take("file")) if isinstance(event, Op)]
    finally:
        core.record_stop("file")


def events(columns: EventColumns) -> Iterator[Event]:
    """Yield the events in the columns, in order."""
    parts = [*zip(columns.part_access, columns.begin, columns.end, strict=True)]
    for i, (kind, block) in enumerate(zip(columns.kind, columns.id.tolist(), strict=True)):
        name, family = columns.name[i], columns.family[i]
        if kind == ALLOC:
            yield Alloc(block, int(columns.bytes[i]), name, family, int(columns.device[i]))
        elif kind == FREE:
            yield Free(block)
        elif kind == OP:
            start, end = columns.access_start[i : i + 2].tolist()
            used = columns.accesses[start:end].tolist()
            reads, us = int(columns.reads[i]), float(columns.us[i])
            rows = [(a - start, *of) for a, *of in parts if start <= a < end]
            yield Op(
                name, tuple(used[:reads]), tuple(used[reads:]), None if us < 0 else us,
                family=family, parts=tuple(int(number) for row in rows for number in row),
            )  # fmt: skip
        else:
            yield Step()


def addresses(recorded: core.Recorded) -> dict[BlockId, Address]:
    """Return the address of every block by its id."""
    made = recorded["kind"] == ALLOC
    ids, places = recorded["id"][made].tolist(), recorded["address"][made].tolist()
    return dict(zip(ids, places, strict=True))
