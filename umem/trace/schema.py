"""The events of a trace, and their validation. docs/trace_format.md has the whole format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import kind_of, shown
from .ids import BlockId

KIND = "umem-trace"
VERSION = 1
MAX_ID = (1 << 63) - 1
MAX_DEVICE = 127  # of torch, whose numbers of devices have one byte
MAX_BYTES = 1 << 60  # of one block
MAX_LIVE_BYTES = 1 << 62  # of all blocks, so that no sum of theirs leaves 64 bits
MAX_US = 1e15  # 31 years; sums of it stay finite
MAX_FLOPS = 1e30
MAX_LINE = 1 << 26  # bytes: several million tensors of one op
MAX_DEPTH = 16  # maximum nesting of the value of an unknown key

# Unknown keys, kept unchanged. None instead of an empty mapping, because nearly all events have no
# such keys.
Extra: TypeAlias = "Mapping[str, object] | None"
# Events are not changed, but not `frozen` either: creating one would take six times as long.


@dataclass(frozen=True, slots=True)
class Header:
    """The first line: the origin of the trace."""

    device: str = ""  # a device profile's name, or a GPU's
    source: str = ""  # the program that wrote it
    note: str = ""
    v: int = VERSION
    extra: Extra = field(default=None, hash=False)


@dataclass(slots=True, unsafe_hash=True)
class Alloc:
    """A block is allocated; `id` names it until its `Free`."""

    id: BlockId
    bytes: int  # as requested
    tag: str = ""
    family: str = ""
    device: int = 0  # its number among the program's
    extra: Extra = field(default=None, hash=False)


@dataclass(slots=True, unsafe_hash=True)
class Op:
    """An operator has ended; its own allocations and frees come before it."""

    name: str
    reads: tuple[BlockId, ...]
    writes: tuple[BlockId, ...]
    us: float | None = None  # its own time, without the ops inside it
    flops: float | None = None
    index: int | None = None
    family: str = ""
    # In rows of three: an index into the reads followed by the writes, and the begin and end of the
    # bytes that the op uses of that block. Without a row it uses all of it.
    parts: tuple[int, ...] = ()
    extra: Extra = field(default=None, hash=False)


@dataclass(slots=True, unsafe_hash=True)
class Free:
    """A block is freed."""

    id: BlockId
    extra: Extra = field(default=None, hash=False)


@dataclass(slots=True, unsafe_hash=True)
class Step:
    """A step of the program (an iteration) ends."""

    extra: Extra = field(default=None, hash=False)


Event: TypeAlias = Alloc | Op | Free | Step


class Validator:
    """Checks events in order; its memory is linear in the live blocks."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}  # bytes by id
        self.live_bytes = 0

    def check(self, event: Event) -> None:
        """Check the next event.

        Raises:
            ValueError: the event is invalid, or invalid at this place; the message is the reason.
        """
        if type(event) is Op:
            self._op(event)
        elif type(event) is Alloc:
            self._alloc(event)
        elif type(event) is Free:
            self._free(event)
        elif type(event) is not Step:
            kind = type(event)
            raise ValueError(f"{kind.__name__} is not an event; allowed: Alloc, Op, Free and Step")
        if event.extra:
            check_extra(event)

    def _op(self, op: Op) -> None:
        _text("name", op.name)
        _text("family", op.family)
        live = self.live
        for name, ids in (("r", op.reads), ("w", op.writes)):
            for block in ids:
                # 7.0 and True equal 7 and 1 as dictionary keys.
                if type(block) is not int or block not in live:
                    _id(name, block)
                    raise ValueError(f"op {op.name!r} uses id {block}, {_NOT_LIVE}")
        if op.us is not None:
            _number("us", op.us, MAX_US)
        if op.flops is not None:
            _number("flops", op.flops, MAX_FLOPS)
        if op.index is not None:
            _integer("i", op.index, MAX_ID)
        if op.parts:
            self._parts(op)

    def _parts(self, op: Op) -> None:
        for value in op.parts:
            _integer("parts", value, MAX_BYTES)
        if len(op.parts) % 3:
            raise ValueError(f"parts is in rows of three, not {len(op.parts)} numbers")
        ids = op.reads + op.writes
        for which, begin, end in zip(*[iter(op.parts)] * 3, strict=True):
            if which >= len(ids):
                raise ValueError(f"parts names access {which} of an op that has {len(ids)}")
            if not begin < end <= self.live[ids[which]]:
                raise ValueError(
                    f"parts has bytes {begin} to {end} of id {ids[which]}, which has "
                    f"{self.live[ids[which]]}"
                )

    def _alloc(self, alloc: Alloc) -> None:
        _id("id", alloc.id)
        _integer("bytes", alloc.bytes, MAX_BYTES)
        _text("tag", alloc.tag)
        _text("family", alloc.family)
        _integer("device", alloc.device, MAX_DEVICE)
        if alloc.id in self.live:
            raise ValueError(f"id {alloc.id} is allocated twice without a free between")
        self.live_bytes += alloc.bytes
        if self.live_bytes > MAX_LIVE_BYTES:
            raise ValueError(f"{self.live_bytes} bytes are live; allowed: {MAX_LIVE_BYTES}")
        self.live[alloc.id] = alloc.bytes

    def _free(self, free: Free) -> None:
        _id("id", free.id)
        size = self.live.pop(free.id, None)
        if size is None:
            raise ValueError(f"free of id {free.id}, {_NOT_LIVE}")
        self.live_bytes -= size


_NOT_LIVE = "which is not live: never allocated, or freed already"

# The keys of each line besides "kind" or "e", and their fields.
KEYS: dict[str, dict[str, str]] = {
    "header": {"v": "v", "device": "device", "source": "source", "note": "note"},
    "alloc": {"id": "id", "bytes": "bytes", "tag": "tag", "family": "family", "device": "device"},
    "op": {
        "i": "index",
        "name": "name",
        "r": "reads",
        "w": "writes",
        "us": "us",
        "flops": "flops",
        "family": "family",
        "parts": "parts",
    },
    "free": {"id": "id"},
    "step": {},
}
NAMES: dict[type, str] = {Header: "header", Alloc: "alloc", Op: "op", Free: "free", Step: "step"}


def check_header(header: Header) -> None:
    """Check a header; raise ValueError with the reason if it is invalid."""
    if type(header.v) is not int or header.v != VERSION:
        raise ValueError(f"version {header.v!r} is unknown; this umem reads version {VERSION}")
    for name in ("device", "source", "note"):
        _text(name, getattr(header, name))
    if header.extra:
        check_extra(header)


def check_extra(line: Header | Event) -> None:
    """Check the unknown keys; raise ValueError if one is known, or its value is not JSON."""
    name = NAMES[type(line)]
    for key, value in (line.extra or {}).items():
        _text("a key", key)
        if key in KEYS[name] or key == ("kind" if name == "header" else "e"):
            raise ValueError(f"{key!r} is a key of the format and cannot be an extra key")
        _json(key, value, MAX_DEPTH)


def _json(key: str, value: object, depth: int) -> None:
    if depth == 0:
        raise ValueError(f"{key!r} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, list):
        for item in value:
            _json(key, item, depth - 1)
    elif isinstance(value, dict):
        for name, item in value.items():
            _text(f"a key in {key!r}", name)
            _json(key, item, depth - 1)
    elif isinstance(value, str):
        _text(key, value)
    elif isinstance(value, float):
        if value - value != 0:  # NaN or infinite
            raise ValueError(f"{key!r} holds {value}, which JSON cannot hold")
    elif value is not None and not isinstance(value, (bool, int)):
        raise ValueError(f"{key!r} holds {kind_of(value)}, which JSON cannot hold")


def _text(name: str, value: object) -> None:
    if type(value) is not str:
        raise ValueError(f"{name} is {shown(value)}, not a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} holds half of a surrogate pair") from None


def _id(name: str, value: object) -> None:
    _integer(name, value, MAX_ID)


def _integer(name: str, value: object, most: int) -> None:
    if type(value) is not int:
        raise ValueError(f"{name} is {shown(value)}, not an integer")
    if not 0 <= value <= most:
        raise ValueError(f"{name} is {shown(value)}; allowed: 0 to {most}")


def _number(name: str, value: object, most: float) -> None:
    if type(value) is not float and type(value) is not int:
        raise ValueError(f"{name} is {shown(value)}, not a number")
    if not 0 <= value <= most:  # false for NaN too
        raise ValueError(f"{name} is {shown(value)}; allowed: 0 to {most:g}")
