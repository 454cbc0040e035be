"""The placement of tensors: single tensors, tables, and the scopes that a program names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from ..base.text_table import aligned
from ..base.units import format_bytes
from ..errors import ConfigError, kind_of
from .spans import parts

if TYPE_CHECKING:
    from ..base.native import core

_HEADINGS = ("name", "tag", "tensors", "bytes", "resident", "evicted", "in flight", "discarded")
_WORDS = (0, 1, 8)  # columns aligned to the left


@dataclass(frozen=True)
class TensorPlacement:
    """The location of a tensor's bytes at one moment, and what umem knows of it.

    `bytes` is the size of the tensor; a view counts from its first element to its last. It is the
    sum of `resident_bytes`, `evicted_bytes`, `discarded_bytes` and `unknown_bytes`. Only the driver
    knows the place of unknown bytes (policy `none`, after page faults). Bytes arrive or leave until
    their transfer ends; they already count as resident or evicted.
    """

    name: str  # in the given module or collection; "" for a single tensor
    scope: str  # the `umem.scope` of its allocation; "" without one
    tag: str  # a tag of `umem.tag`, or pool: it shares a page with other small tensors
    family: str  # category of the operator that made it: conv, linear, norm, ...
    address: int
    held: bool  # in umem's memory; if not, all fields after `bytes` are 0
    bytes: int
    resident_bytes: int = 0
    evicted_bytes: int = 0
    discarded_bytes: int = 0
    unknown_bytes: int = 0
    arriving_bytes: int = 0
    leaving_bytes: int = 0
    pins: int = 0  # the maximum over its pages
    excluded: bool = False
    in_use: bool = False  # by a running op


def where(tensor: object) -> TensorPlacement:
    """Return the placement of a tensor or view; works also while umem is off.

    Raises:
        ConfigError: `tensor` is not a tensor.
    """
    found = parts(tensor, "where")
    if len(found) != 1 or found[0].tensor is not tensor:
        raise ConfigError(
            f"umem.where(...) was given {kind_of(tensor)}; allowed: a tensor. umem.tensors(...) "
            "lists those of a module or collection"
        )
    return tensors(tensor)[0]


class PlacementReport(tuple[TensorPlacement, ...]):
    """A tuple of placements, printed as a table by name, or by scope and tag without names."""

    __slots__ = ()

    def __str__(self) -> str:
        return _table(self)

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return f"<pre>{escape(str(self))}</pre>"


def tensors(target: object = None) -> PlacementReport:
    """Return the placement of each tensor of the target, in order; works also while umem is off.

    Args:
        target: a tensor, a module (its parameters and buffers), or a list, tuple or mapping of
            them; None: all blocks that umem has allocated, by address.

    Raises:
        ConfigError: no such target.
        NotSupportedError: the native core is not installed.
    """
    from ..base.native import core

    if target is None:
        return PlacementReport(_row("", row["address"], row) for row in core.placed_blocks())
    rows = []
    for part in parts(target, "tensors"):
        if part.nbytes and core.owns(part.address):
            rows.append(_row(part.name, part.address, core.where(*part.span)))
        else:
            rows.append(TensorPlacement(part.name, "", "", "", part.address, False, part.nbytes))
    return PlacementReport(rows)


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Name this thread's allocations: `with umem.scope("encoder"):`, or as a decorator.

    Scopes nest: "encoder" inside "model" is `model/encoder`. `umem.tensors` and `umem.where` show
    the names. Other threads have scopes of their own, for example the thread of a backward pass on
    a GPU. While umem is off, this has no effect.

    Raises:
        ConfigError: the name is empty, contains a "/", or cannot be printed.
    """
    if not isinstance(name, str) or not name or "/" in name or not name.isprintable():
        raise ConfigError(f'umem.scope({name!r}): allowed: a non-empty, printable name without "/"')
    from ..base.native import core

    outer = core.set_scope("")
    core.set_scope(f"{outer}/{name}" if outer else name)
    try:
        yield
    finally:
        core.set_scope(outer)


def _row(name: str, address: int, row: core.Whereabouts) -> TensorPlacement:
    return TensorPlacement(
        name,
        row["scope"],
        row["tag"],
        row["family"],
        address,
        True,
        row["bytes"],
        row["resident_bytes"],
        row["evicted_bytes"],
        row["discarded_bytes"],
        row["unknown_bytes"],
        row["arriving_bytes"],
        row["leaving_bytes"],
        row["pins"],
        row["exempt"],
        row["in_use"],
    )


def _table(rows: Sequence[TensorPlacement]) -> str:
    """Format one line per name, or per scope and tag, the largest first, and a total."""
    groups: dict[tuple[str, str], list[TensorPlacement]] = {}
    for row in rows:
        tag = row.tag if row.held else "not managed"
        groups.setdefault((row.name or row.scope or "-", tag), []).append(row)
    ordered = sorted(groups.items(), key=lambda group: -sum(row.bytes for row in group[1]))
    lines = [_line(*key, group) for key, group in ordered]
    lines.append(_line("total", "", rows))
    return "\n".join(aligned([(*_HEADINGS, ""), *lines], _WORDS))


def _line(name: str, tag: str, rows: Sequence[TensorPlacement]) -> tuple[str, ...]:
    flight = sum(row.arriving_bytes + row.leaving_bytes for row in rows)
    sums = (
        sum(row.bytes for row in rows),
        sum(row.resident_bytes for row in rows),
        sum(row.evicted_bytes for row in rows),
        flight,
        sum(row.discarded_bytes for row in rows),
    )
    return name, tag, str(len(rows)), *(format_bytes(n) if n else "-" for n in sums), _notes(rows)


def _notes(rows: Sequence[TensorPlacement]) -> str:
    notes = [
        ("pinned", sum(row.bytes for row in rows if row.pins)),
        ("excluded", sum(row.bytes for row in rows if row.excluded)),
        ("known only to the driver", sum(row.unknown_bytes for row in rows)),
    ]
    return ", ".join(f"{format_bytes(n)} {note}" for note, n in notes if n)
