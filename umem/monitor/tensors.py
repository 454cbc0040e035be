"""A table of tensors and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..base.units import format_bytes

_HEADINGS = ("name", "tag", "tensors", "bytes", "resident", "evicted", "in flight", "discarded")
_NUMBERS = 6  # columns with numbers, counted from the right


class TensorRow(Protocol):
    """A row of the table: `umem.residency.placement.TensorPlacement`."""

    @property
    def name(self) -> str: ...
    @property
    def scope(self) -> str: ...
    @property
    def tag(self) -> str: ...
    @property
    def held(self) -> bool: ...
    @property
    def bytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def evicted_bytes(self) -> int: ...
    @property
    def discarded_bytes(self) -> int: ...
    @property
    def unknown_bytes(self) -> int: ...
    @property
    def arriving_bytes(self) -> int: ...
    @property
    def leaving_bytes(self) -> int: ...
    @property
    def pins(self) -> int: ...
    @property
    def excluded(self) -> bool: ...


def table(rows: Sequence[TensorRow]) -> str:
    """Format one line per name, or per scope and tag, the largest first, and a total."""
    groups: dict[tuple[str, str], list[TensorRow]] = {}
    for row in rows:
        tag = row.tag if row.held else "not managed"
        groups.setdefault((row.name or row.scope or "-", tag), []).append(row)
    ordered = sorted(groups.items(), key=lambda group: -sum(row.bytes for row in group[1]))
    lines = [_line(*key, group) for key, group in ordered]
    lines.append(_line("total", "", rows))
    return _aligned([(*_HEADINGS, ""), *lines])


def _line(name: str, tag: str, rows: Sequence[TensorRow]) -> tuple[str, ...]:
    flight = sum(row.arriving_bytes + row.leaving_bytes for row in rows)
    sums = (
        sum(row.bytes for row in rows),
        sum(row.resident_bytes for row in rows),
        sum(row.evicted_bytes for row in rows),
        flight,
        sum(row.discarded_bytes for row in rows),
    )
    return name, tag, str(len(rows)), *(format_bytes(n) if n else "-" for n in sums), _notes(rows)


def _notes(rows: Sequence[TensorRow]) -> str:
    notes = [
        ("pinned", sum(row.bytes for row in rows if row.pins)),
        ("excluded", sum(row.bytes for row in rows if row.excluded)),
        ("known only to the driver", sum(row.unknown_bytes for row in rows)),
    ]
    return ", ".join(f"{format_bytes(n)} {note}" for note, n in notes if n)


def _aligned(lines: list[tuple[str, ...]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    first = len(_HEADINGS) - _NUMBERS
    return "\n".join(
        "  ".join(
            cell.rjust(width) if first <= i < len(_HEADINGS) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
