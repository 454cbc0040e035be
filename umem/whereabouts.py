"""Where tensors are: one by one, all of them as a table, and by names that the program gives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import ConfigError
from .targets import parts

if TYPE_CHECKING:
    from ._core import Whereabouts

TAGS = (
    "param", "grad", "optimizer", "activation", "input", "workspace", "temp", "comm", "kv_cache",
    "pool",
)  # fmt: skip


@dataclass(frozen=True)
class Where:
    """Where a tensor's bytes are at one moment, and what umem knows of it.

    `bytes` are the tensor's: of a view those from its first element to its last. They are
    `resident_bytes`, `evicted_bytes`, `discarded_bytes` and `unknown_bytes` together; the last are
    those that only the driver knows about (policy `none`, what page faults brought in). Bytes
    arrive or leave while a transfer of them has not ended: they count as resident or evicted
    already.
    """

    name: str  # in the module or collection that was asked about; "" for a tensor alone
    scope: str  # `umem.scope` in which it was allocated; "" for none
    tag: str  # one of `TAGS`; pool: shares a page with other small ones
    family: str  # of the operator that made it: conv, linear, norm, ...
    address: int
    held: bool  # in umem's memory; all below is 0 where it is not
    bytes: int
    resident_bytes: int = 0
    evicted_bytes: int = 0
    discarded_bytes: int = 0
    unknown_bytes: int = 0
    arriving_bytes: int = 0
    leaving_bytes: int = 0
    pins: int = 0  # the most of any page of it
    excluded: bool = False
    in_use: bool = False  # by a running op


def where(tensor: object) -> Where:
    """Where one tensor or view is, also while umem is off.

    Raises:
        ConfigError: it is no tensor.
    """
    found = parts(tensor, "where")
    if len(found) != 1 or found[0].tensor is not tensor:
        kind = type(tensor).__name__
        raise ConfigError(
            f"umem.where(...) was given a {kind}; allowed: a tensor. umem.tensors(...) lists those "
            "of a module or collection"
        )
    return tensors(tensor)[0]


class Report(tuple[Where, ...]):
    """Some tensors; as text a table, by name, or by scope and tag where there are no names."""

    __slots__ = ()

    def __str__(self) -> str:
        from .report.tensors import table

        return table(self)


def tensors(target: object = None) -> Report:
    """Where all tensors of the target are, in its order, also while umem is off; `print` it.

    Args:
        target: a tensor, a module (its parameters and buffers), or a list, tuple or mapping of
            them; None: all memory that umem has handed out, by address, each block whole.

    Raises:
        ConfigError: no such target.
        NotSupportedError: the native core is not installed.
    """
    from .native import core

    if target is None:
        return Report(_row("", row["address"], row) for row in core.placed_blocks())
    rows = []
    for part in parts(target, "tensors"):
        if part.nbytes and core.owns(part.address):
            rows.append(_row(part.name, part.address, core.where(*part.span)))
        else:
            rows.append(Where(part.name, "", "", "", part.address, False, part.nbytes))
    return Report(rows)


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Name what this thread allocates inside: `with umem.scope("encoder"):`, or as a decorator.

    Scopes nest: "model", "encoder" inside of it is `model/encoder`. `umem.tensors` and
    `umem.where` show the names. While umem is off nothing is allocated from it, so nothing is
    named. Other threads have scopes of their own, as the one of a backward pass on a GPU.

    Raises:
        ConfigError: an empty name, or one with a "/".
    """
    if not isinstance(name, str) or not name or "/" in name:
        raise ConfigError(f'umem.scope({name!r}): allowed: a name without "/", and not empty')
    from .native import core

    outer = core.set_scope("")
    core.set_scope(f"{outer}/{name}" if outer else name)
    try:
        yield
    finally:
        core.set_scope(outer)


def _row(name: str, address: int, row: Whereabouts) -> Where:
    return Where(
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
