"""The place in a program where a block was made: extra keys of an `alloc`, and text for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import plain
from .ids import BlockId
from .schema import Alloc, Event

MODULE, LINE = "module", "line"  # keys; docs/trace_format.md
_PACKAGE = Path(__file__).parents[1]


def keys(module: str, line: str) -> dict[str, object] | None:
    """Return the extra keys of a block; None if nothing is known.

    Args:
        module: the path of the module in its model; may be empty.
        line: `file:line`; paths become relative to the working directory, or keep one folder.
    """
    known: dict[str, object] = {}
    if module:
        known[MODULE] = plain(module)
    if short := _short(line):
        known[LINE] = plain(short)  # a trace takes no name that is not UTF-8
    return known or None


def text(extra: Mapping[str, object] | None) -> str:
    """Return `module · file:line`, as far as the keys have it; else empty."""
    parts = [(extra or {}).get(key) for key in (MODULE, LINE)]
    return " · ".join([part for part in parts if isinstance(part, str) and part])


def of_blocks(events: Iterable[Event]) -> dict[BlockId, str]:
    """Return the texts of the blocks whose events have an origin, unless an id has several."""
    found: dict[BlockId, str] = {}
    for event in events:
        if type(event) is Alloc:
            place = text(event.extra)
            found[event.id] = place if found.setdefault(event.id, place) == place else ""
    return {block: place for block, place in found.items() if place}


def _short(line: str) -> str:
    """Return the place without folders of this machine; empty for one in umem's own code."""
    path, _, number = line.rpartition(":")
    if not path:
        return ""
    place = Path(path)
    if place.is_relative_to(_PACKAGE) and not place.is_relative_to(_PACKAGE / "demo"):
        return ""
    if place.is_relative_to(Path.cwd()):
        place = place.relative_to(Path.cwd())
    return f"{place if not place.is_absolute() else Path(*place.parts[-2:])}:{number}"
