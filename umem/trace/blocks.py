"""The blocks of a trace as a table: when each lived, what made and used it, and for how long."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..base import extras
from .schema import Alloc, Event, Free, Op

_ROWS = 1 << 16  # in memory at once, for Parquet


@dataclass(slots=True)
class BlockLife:
    """One block, from its allocation to its free. Operators are counted from 0 over the trace.

    Times are µs of the operators' own time since the start of the trace; an operator without a
    time counts as 0.
    """

    id: int
    device: int
    tag: str
    family: str
    bytes: int
    born_op: int  # the operator inside which it was allocated
    born_us: float
    freed_op: int | None = None  # the first operator after it; None: live at the end
    freed_us: float | None = None
    made_by: str = ""  # the first operator that uses it
    uses: int = 0  # operators that read or write it
    reads: int = 0
    writes: int = 0
    last_use_op: int | None = None
    longest_unused_ops: int = 0  # most operators between two uses of it
    longest_unused_us: float = 0.0


COLUMNS = tuple(field.name for field in fields(BlockLife))


def lives(events: Iterable[Event]) -> Iterator[BlockLife]:
    """Yield each block when it is freed, and those that stay, in the order of their allocation."""
    live: dict[int, BlockLife] = {}
    ended: dict[int, float] = {}  # when the last use of a block was over, by its id
    number, now = 0, 0.0
    for event in events:
        if type(event) is Alloc:
            a = event
            live[a.id] = BlockLife(a.id, a.device, a.tag, a.family, a.bytes, number, now)
        elif type(event) is Free:
            block = live.pop(event.id)
            ended.pop(event.id, None)
            block.freed_op, block.freed_us = number, now
            yield block
        elif type(event) is Op:
            reads, writes = set(event.reads), set(event.writes)
            for used in reads | writes:
                block = live[used]
                if block.last_use_op is None:
                    block.made_by = event.name
                else:
                    unused = number - block.last_use_op - 1
                    block.longest_unused_ops = max(block.longest_unused_ops, unused)
                    block.longest_unused_us = max(block.longest_unused_us, now - ended[used])
                block.uses += 1
                block.reads += used in reads
                block.writes += used in writes
                block.last_use_op = number
                ended[used] = now + (event.us or 0.0)
            number += 1
            now += event.us or 0.0
    yield from live.values()


def write_csv(path: Path, events: Iterable[Event]) -> None:
    """Write a line for each block, after one with the names of columns; no value is empty."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(map(asdict, lives(events)))


def write_parquet(path: Path, events: Iterable[Event]) -> None:
    """Write a row for each block.

    Raises:
        NotSupportedError: pyarrow is not installed.
    """
    arrow, parquet = (
        extras.load(name, "Parquet", "pyarrow") for name in ("pyarrow", "pyarrow.parquet")
    )
    kinds = {"int": arrow.int64(), "float": arrow.float64(), "str": arrow.string()}
    schema = arrow.schema(
        [(field.name, kinds[str(field.type).partition(" ")[0]]) for field in fields(BlockLife)]
    )
    with parquet.ParquetWriter(path, schema) as writer:
        rows: list[dict[str, Any]] = []
        for block in lives(events):
            rows.append(asdict(block))
            if len(rows) == _ROWS:
                writer.write_table(arrow.Table.from_pylist(rows, schema))
                rows.clear()
        writer.write_table(arrow.Table.from_pylist(rows, schema))
