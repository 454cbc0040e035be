"""A table of tensors and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..base.text_table import aligned
from ..base.units import format_bytes

_HEADINGS = ("name", "tag", "tensors", "bytes", "resident", "evicted", "in flight", "discarded")
_WORDS = (0, 1, 8)  # columns aligned to the left


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
    return "\n".join(aligned([(*_HEADINGS, ""), *lines], _WORDS))


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
