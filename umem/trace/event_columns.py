"""The events of a trace in columns, from the native recorder or collected from a file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from .ids import BlockId
from .schema import Alloc, Event, Free, Op, Step
from .step_trace import Floats, Ints

if TYPE_CHECKING:
    from ..base.native import core

ALLOC, OP, FREE, STEP = range(4)
UNTIMED = -1.0  # µs of an op whose time is not known


@dataclass(frozen=True, eq=False)
class EventColumns:
    """Events in order, a row for each; columns that do not concern a row have 0 or "" there."""

    kind: Ints  # [n] ALLOC, OP, FREE or STEP
    id: Ints  # [n] the block that is allocated or freed
    bytes: Ints  # [n] of the allocated block, as requested
    device: Ints  # [n] of the allocated block
    us: Floats  # [n] of the op; negative: not known
    reads: Ints  # [n] number of blocks that the op reads
    writes: Ints  # [n] number of blocks that the op writes
    accesses: Ints  # for each op the blocks that it reads, then the blocks that it writes
    # Byte ranges: the op uses only these of access number `part_access`; without a row, all of it.
    part_access: Ints
    begin: Ints
    end: Ints
    name: Sequence[str]  # [n] of the op; of an allocated block its tag
    family: Sequence[str]  # [n]
    source: Sequence[Event | None]  # [n] the event that a row was made from; empty: all are native

    @classmethod
    def of_native(cls, recorded: core.Recorded) -> EventColumns:
        """Return the columns of `core.record_take`.

        Blocks that were live at the start come first, as allocations.
        """
        return cls(**{name: recorded[name] for name in _NATIVE}, source=())  # type: ignore[literal-required]

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def access_start(self) -> Ints:
        """[n + 1] The accesses of row i are access_start[i] up to access_start[i + 1]."""
        return np.concatenate(([0], np.cumsum(self.reads + self.writes)))

    def slice(self, begin: int, end: int) -> EventColumns:
        """Return the rows from `begin` up to `end`."""
        if (begin, end) == (0, len(self)):
            return self
        first, last = self.access_start[[begin, end]].tolist()
        # Within an op ranges have any order, but those of an op come after those of the op before.
        parts = slice(*np.searchsorted(self.part_access, (first, last)).tolist())
        rows = slice(begin, end)
        return EventColumns(
            **{name: getattr(self, name)[rows] for name in _BY_ROW},
            accesses=self.accesses[first:last],
            part_access=self.part_access[parts] - first,
            begin=self.begin[parts],
            end=self.end[parts],
        )

    def with_times(self) -> EventColumns:
        """Return these rows; an op without a time has the median of those of its name, or 0."""
        if not (self.us < 0).any():
            return self
        times: defaultdict[str, list[float]] = defaultdict(list)
        for row in np.flatnonzero((self.kind == OP) & (self.us >= 0)).tolist():
            times[self.name[row]].append(float(self.us[row]))
        medians = {name: median(of_name) for name, of_name in times.items()}
        us = self.us.copy()
        for row in np.flatnonzero(us < 0).tolist():
            us[row] = medians.get(self.name[row], 0.0)
        return replace(self, us=us)

    def take(self, rows: Ints) -> EventColumns:
        """Return these rows, none of which is an op."""
        none = np.zeros(0, np.int64)
        chosen = rows.tolist()
        lists = _LISTS if self.source else ("name", "family")
        columns: dict[str, Any] = {
            "source": (),
            **{name: getattr(self, name)[rows] for name in _ARRAYS},
            **{name: [getattr(self, name)[i] for i in chosen] for name in lists},
        }
        return EventColumns(**columns, accesses=none, part_access=none, begin=none, end=none)

    def then(self, more: EventColumns) -> EventColumns:
        """Return these rows and those of `more`."""
        if not len(self):
            return more
        joined: dict[str, Any] = {
            name: np.concatenate((getattr(self, name), getattr(more, name)))
            for name in (*_ARRAYS, "accesses", "begin", "end")
        }
        part = np.concatenate((self.part_access, more.part_access + len(self.accesses)))
        joined |= {
            "name": [*self.name, *more.name],
            "family": [*self.family, *more.family],
            "source": [*self._sources(), *more._sources()] if self.source or more.source else (),
        }
        return EventColumns(**joined, part_access=part)

    def _sources(self) -> Sequence[Event | None]:
        return self.source or [None] * len(self)

    def steps(self) -> Iterator[tuple[EventColumns, bool]]:
        """Yield the rows between the ends of steps, and whether a step ends after them."""
        begin = 0
        for end in np.flatnonzero(self.kind == STEP).tolist():
            yield self.slice(begin, end), True
            begin = end + 1
        if begin < len(self):
            yield self.slice(begin, len(self)), False


_ARRAYS = ("kind", "id", "bytes", "device", "us", "reads", "writes")
_LISTS = ("name", "family", "source")
_BY_ROW = (*_ARRAYS, *_LISTS)
_NATIVE = tuple(field.name for field in fields(EventColumns) if field.name != "source")


class EventRows:
    """Collects events, one at a time, for columns."""

    def __init__(self) -> None:
        self._rows: list[tuple[object, ...]] = []
        self._accesses: list[BlockId] = []
        self._parts: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, Op):
            self.op(
                event.name, event.reads, event.writes, event.us,
                family=event.family, parts=event.parts, source=event,
            )  # fmt: skip
        elif isinstance(event, Alloc):
            self.plain(
                ALLOC, event.id, size=event.bytes, device=event.device,
                name=event.tag, family=event.family, source=event,
            )  # fmt: skip
        elif isinstance(event, Free):
            self.plain(FREE, event.id, source=event)
        else:
            self.plain(STEP, source=event)

    def plain(
        self,
        kind: int,
        block: int = 0,
        *,
        size: int = 0,
        device: int = 0,
        name: str = "",
        family: str = "",
        source: Event | None = None,
    ) -> None:
        """Take the next event, which is no op; the arguments are as the columns."""
        self._rows.append((kind, block, size, device, 0.0, 0, 0, name, family, source))

    def op(
        self,
        name: str,
        reads: Sequence[BlockId],
        writes: Sequence[BlockId],
        us: float | None,
        *,
        family: str = "",
        parts: Sequence[int] = (),
        source: Event | None = None,
    ) -> None:
        """Take the next event, an op; the arguments are as those of `schema.Op`."""
        if parts:
            at = len(self._accesses)
            rows = zip(*[iter(parts)] * 3, strict=True)
            self._parts += [(at + which, begin, end) for which, begin, end in rows]
        self._accesses += reads
        self._accesses += writes
        time = UNTIMED if us is None else us
        self._rows.append((OP, 0, 0, 0, time, len(reads), len(writes), name, family, source))

    def columns(self) -> EventColumns:
        """Return what was collected so far."""
        columns: list[Any] = list(zip(*self._rows, strict=True)) or [()] * 10
        types = [np.int64] * 4 + [np.float64] + [np.int64] * 2
        arrays = [np.array(column, dtype) for column, dtype in zip(columns, types, strict=False)]
        made: dict[str, Any] = dict(zip(_BY_ROW, [*arrays, *columns[len(arrays) :]], strict=True))
        part_access, begin, end = np.array(self._parts, np.int64).reshape(-1, 3).T
        accesses = np.array(self._accesses, np.int64)
        return EventColumns(
            **made, accesses=accesses, part_access=part_access, begin=begin, end=end
        )


def by_step(events: Iterable[Event]) -> Iterator[EventColumns]:
    """Yield the columns of each step's events, with its end; last those after the last step."""
    rows = EventRows()
    for event in events:
        rows.add(event)
        if isinstance(event, Step):
            yield rows.columns()
            rows = EventRows()
    if rows:
        yield rows.columns()
