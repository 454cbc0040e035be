"""Builds the columns of one step from events."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np

from ..base.units import PAGE_BYTES, PIECE_BYTES
from ..errors import TraceError
from .reader import read
from .schema import Alloc, Event, Free, Op, Step
from .step_trace import Bools, Ints, Kind, Parts, StepTrace

SMALL_BYTES = 256  # sizes of small tensors are rounded up to a multiple
ALWAYS_THERE = ("param", "optimizer")  # tags that mean it, where one step does not show it


def device_bytes(count: int) -> int:
    """Return the bytes that a tensor of `count` bytes takes: whole pages from one page on."""
    unit = PAGE_BYTES if count >= PAGE_BYTES else SMALL_BYTES
    return -(-count // unit) * unit


def on_device(asked: Ints) -> tuple[Ints, Bools]:
    """Return `device_bytes` of many tensors, and which of them are large."""
    large = asked >= PAGE_BYTES
    unit = np.where(large, PAGE_BYTES, SMALL_BYTES)
    return -(-asked // unit) * unit, large


def last_step(events: Iterable[Event]) -> StepTrace:
    """Return the last complete step of a trace's events.

    Raises:
        TraceError: the events are not a valid trace, or the step has no op that accesses memory.
    """
    builder = StepBuilder()
    for event in events:
        builder.add(event)
    return builder.step()


def read_step(path: str | os.PathLike[str]) -> StepTrace:
    """Return the last complete step of a trace file.

    Raises:
        TraceError: the file is not a valid trace, or the step has no op that accesses memory.
    """
    builder = StepBuilder()
    for event in read(path)[1]:
        builder.add(event)
    try:
        return builder.step()
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


class _Born(NamedTuple):
    """A live block, allocated as the `ordinal`-th of step `step`."""

    alloc: Alloc
    step: int
    ordinal: int


@dataclass(frozen=True, slots=True)
class _Part:
    """The events from one `Step` to the next, and the blocks that were live before them."""

    number: int
    live: Mapping[int, _Born]
    after_ops: bool = False  # the part before had ops, so ordinals can be compared
    events: list[Event] = field(default_factory=list)


class StepBuilder:
    """Takes a trace's events in order, keeps the last two steps and the live blocks.

    A step ends at its `Step`. Parts without ops are not steps: a recording that starts midway
    lists the live blocks in such a part, before its first step. A trace without any `Step` has one
    step, which is the whole trace.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0  # of the whole trace, in bytes on the device
        self._bytes = 0
        self._live: dict[int, _Born] = {}
        self._steps = 0
        self._done: deque[_Part] = deque(maxlen=2)
        self._now = _Part(0, {})
        self._ordinal = 0
        self._ops = 0  # of this part

    @property
    def steps(self) -> int:
        """Number of complete steps; 1 for a trace that does not mark any."""
        return self._steps or int(self._ops > 0)

    def add(self, event: Event) -> None:
        """Take the next event.

        Raises:
            TraceError: a block is allocated twice, or freed and not live.
        """
        kind = type(event)
        if kind is Op:
            self._ops += 1
        elif kind is Alloc:
            self._alloc(event)  # type: ignore[arg-type]
        elif kind is Free:
            self._free(event)  # type: ignore[arg-type]
        else:
            self._step()
            return
        self._now.events.append(event)

    def step(self, index: int = -1, cut: Iterable[int] = ()) -> StepTrace:
        """Return the last complete step in steady state; -2 is the one before.

        A block of which an op of the step uses at most half is cut into smaller pieces than others,
        and so is each of its size: `core.finer_piece`.

        Args:
            cut: sizes of ranges whose blocks are cut all the same.

        Raises:
            TraceError: there is no such step, or it has no op that accesses memory.
        """
        return _Columns(self._part(index), set(cut)).build()

    def events(self, index: int = -1) -> Iterator[Event]:
        """Yield a trace of that step alone; its `step` differs in a few next-step aliases at most.

        Raises:
            TraceError: there is no such step.
        """
        part = self._part(index)
        yield from (born.alloc for born in part.live.values())
        if part.number:
            yield Step()
        yield from part.events
        yield Step()

    def _part(self, index: int) -> _Part:
        parts = [*self._done] or [self._now]
        if not -len(parts) <= index < 0:
            raise TraceError(f"step {index} is not kept; kept: -{len(parts)} to -1")
        return parts[index]

    def _alloc(self, alloc: Alloc) -> None:
        if alloc.id in self._live:
            raise TraceError(f"id {alloc.id} is allocated twice without a free between")
        self._live[alloc.id] = _Born(alloc, self._now.number, self._ordinal)
        self._ordinal += 1
        self._bytes += device_bytes(alloc.bytes)
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _free(self, free: Free) -> None:
        born = self._live.pop(free.id, None)
        if born is None:
            raise TraceError(f"free of id {free.id}, which is not live")
        self._bytes -= device_bytes(born.alloc.bytes)

    def _step(self) -> None:
        if not self._now.events:
            return  # a second end of the same step
        if self._ops:
            self._done.append(self._now)
            self._steps += 1
        self._now = _Part(self._now.number + 1, dict(self._live), after_ops=self._ops > 0)
        self._ordinal = self._ops = 0


class _Columns:
    """A StepTrace under construction."""

    def __init__(self, part: _Part, cut: set[int]) -> None:
        self._part = part
        self._cut = cut  # sizes of ranges
        self._ranges: list[tuple[tuple[int, int], ...]] = []  # of each access; (): all
        self._medians = _medians(part.events)
        self._of: dict[int, int] = {}  # the tensor of each live id; -1 if it has no bytes
        self._born: list[_Born] = []
        self._families: list[str] = []
        self._kind: list[Kind] = []
        self._first: list[int] = []
        self._last: list[int | None] = []
        self._op_us: list[float] = []
        self._names: list[str] = []
        self._starts = [0]
        self._tensors: list[int] = []
        self._writes: list[bool] = []
        self._reads: list[bool] = []
        self._read_first: set[int] = set()  # ids that the first op reads
        self._idle_us = 0.0  # of ops without accesses, until the next one with some

    def build(self) -> StepTrace:
        """Return the columns of the part."""
        for born in self._part.live.values():
            self._tensor(born, Kind.CARRIED)
        ordinal = 0
        for event in self._part.events:
            if type(event) is Op:
                self._op(event)
            elif type(event) is Alloc:
                self._tensor(_Born(event, self._part.number, ordinal), Kind.TRANSIENT)
                ordinal += 1
            elif type(event) is Free:
                self._free(event.id)
        if not self._op_us:
            raise TraceError("the step has no op that accesses memory; nothing to plan")
        self._op_us[-1] += self._idle_us
        self._end()
        return self._columns()

    def _tensor(self, born: _Born, kind: Kind) -> None:
        if born.alloc.bytes == 0:
            self._of[born.alloc.id] = -1
            return
        self._of[born.alloc.id] = len(self._born)
        self._born.append(born)
        self._families.append(born.alloc.family)
        self._kind.append(kind)
        self._first.append(len(self._op_us))
        self._last.append(None)

    def _free(self, block: int) -> None:
        tensor = self._of.pop(block)
        if tensor < 0:
            return
        now = len(self._op_us)
        # A block that an op allocates and frees has its events before the op, and is live in it.
        inside = self._first[tensor] == now and self._kind[tensor] == Kind.TRANSIENT
        self._last[tensor] = now if inside else now - 1

    def _op(self, op: Op) -> None:
        try:
            read = {self._of[block]: False for block in op.reads}
            accesses = read | {self._of[block]: True for block in op.writes}
        except KeyError as error:
            raise TraceError(f"op {op.name!r} uses id {error}, which is not live") from None
        accesses.pop(-1, None)
        us = self._medians.get(op.name, 0.0) if op.us is None else op.us
        if not accesses:
            self._idle_us += us
            return
        if not self._op_us:
            self._read_first = set(op.reads)
        if op.family:
            self._inherit(op.family, accesses)
        self._op_us.append(us + self._idle_us)
        self._idle_us = 0.0
        self._names.append(op.name)
        ranges = self._used(op) if op.parts else {}
        self._ranges.extend(ranges.get(tensor, ()) for tensor in accesses)
        self._tensors.extend(accesses)
        self._writes.extend(accesses.values())
        self._reads.extend(tensor in read for tensor in accesses)
        self._starts.append(len(self._tensors))

    def _used(self, op: Op) -> dict[int, tuple[tuple[int, int], ...]]:
        """Return the byte ranges of tensors that the op uses parts of."""
        blocks = op.reads + op.writes
        rows: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for which, begin, end in zip(*[iter(op.parts)] * 3, strict=True):
            rows[which].append((begin, end))
        whole = {self._of[block] for i, block in enumerate(blocks) if i not in rows}
        used: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        for which, ranges in rows.items():
            used[self._of[blocks[which]]].update(ranges)
        return {t: tuple(sorted(ranges)) for t, ranges in used.items() if t not in whole}

    def _inherit(self, family: str, accesses: dict[int, bool]) -> None:
        now = len(self._op_us)
        for tensor, written in accesses.items():
            new = self._kind[tensor] == Kind.TRANSIENT and self._first[tensor] == now
            if written and new and not self._families[tensor]:
                self._families[tensor] = family

    def _end(self) -> None:
        """Set kinds and lifetimes, now that the remaining tensors are known."""
        last_op = len(self._op_us) - 1
        before = self._before_first_op() if self._part.number == 0 else set()
        for tensor, born in enumerate(self._born):
            self._first[tensor] = min(self._first[tensor], last_op)
            last = self._last[tensor]
            self._last[tensor] = last_op if last is None else min(last, last_op)
            if last is not None:
                continue
            known = self._part.number == 0 and born.alloc.tag in ALWAYS_THERE
            if self._kind[tensor] == Kind.CARRIED or known or tensor in before:
                self._kind[tensor] = Kind.PERSISTENT
                self._first[tensor] = 0
            else:
                self._kind[tensor] = Kind.MADE

    def _before_first_op(self) -> set[int]:
        """Return the tensors that existed before the first op: not made by it, but allocated."""
        end = self._starts[1]
        made = {
            tensor
            for tensor, written in zip(self._tensors[:end], self._writes[:end], strict=True)
            if written and self._born[tensor].alloc.id not in self._read_first
        }
        return {t for t, first in enumerate(self._first) if first == 0} - made

    def _columns(self) -> StepTrace:
        last = np.array(self._last, np.int64)
        # Tensors freed before the first op are live in no op.
        kept = np.flatnonzero(last >= 0)
        new = np.full(len(last), -1, np.int64)
        new[kept] = np.arange(len(kept))
        asked = np.array([born.alloc.bytes for born in self._born], np.int64)[kept]
        taken, large = on_device(asked)
        tensors = new[np.array(self._tensors, np.int64)]
        part, parts = self._parts()
        next_aliases = self._next_aliases()
        next_alias = np.array([next_aliases.get(t, -1) for t in kept.tolist()], np.int64)
        return StepTrace(
            op_us=np.array(self._op_us, np.float64),
            op_names=tuple(self._names),
            bytes=taken,
            large=large,
            tags=tuple(self._born[t].alloc.tag for t in kept),
            families=tuple(self._families[t] for t in kept),
            kind=np.array(self._kind, np.int64)[kept],
            first=np.array(self._first, np.int64)[kept],
            last=last[kept],
            next_alias=np.where(next_alias < 0, -1, new[next_alias]),
            source=np.array([self._born[t].alloc.id for t in kept], np.int64),
            access_start=np.array(self._starts, np.int64),
            access_tensor=tensors,
            access_write=np.array(self._writes, np.bool_),
            access_read=np.array(self._reads, np.bool_),
            access_part=part,
            parts=parts,
            cut=self._pieces(asked, large, tensors),
        )

    def _parts(self) -> tuple[Ints | None, Parts | None]:
        """Return what each access is of, and the sets that this names."""
        if not any(self._ranges):
            return None, None
        number = {ranges: i for i, ranges in enumerate(dict.fromkeys(filter(None, self._ranges)))}
        rows = [row for ranges in number for row in ranges]
        begin, end = np.array(rows, np.int64).T
        start = np.concatenate(([0], np.cumsum([len(ranges) for ranges in number])))
        part = np.array([number.get(ranges, -1) for ranges in self._ranges], np.int64)
        return part, Parts(start.astype(np.int64), begin, end)

    def _pieces(self, asked: Ints, large: Bools, tensors: Ints) -> Ints | None:
        """Return the bytes of the pieces that each tensor is cut into; None: 64 MiB each."""
        used: dict[int, int] = {}  # the least that an access is of
        for access, ranges in enumerate(self._ranges):
            if ranges:
                tensor, size = int(tensors[access]), sum(end - begin for begin, end in ranges)
                used[tensor] = min(used.get(tensor, size), size)
        few = [t for t, size in used.items() if large[t] and 2 * size <= asked[t]]
        if not few and not self._cut:
            return None
        from ..base.native import core

        cut = self._cut | {core.range_bytes(int(asked[t])) for t in few}
        sizes, place = np.unique(asked, return_inverse=True)
        pieces = [
            core.finer_piece(size) if size >= PAGE_BYTES and core.range_bytes(size) in cut
            else PIECE_BYTES
            for size in sizes.tolist()
        ]  # fmt: skip
        return np.array(pieces, np.int64)[place]

    def _next_aliases(self) -> dict[int, int]:
        """Match each CARRIED tensor with its MADE tensor, where there is one.

        In steady state it is the one with the same ordinal among its step's allocations. The
        others are matched by order among those of equal bytes and tag: the steps differ a little,
        or the one before was not recorded.
        """
        made = [t for t, kind in enumerate(self._kind) if kind == Kind.MADE]
        carried = [t for t, kind in enumerate(self._kind) if kind == Kind.CARRIED]
        place = {(self._born[t].ordinal, self._born[t].alloc.bytes): t for t in made}
        next_aliases: dict[int, int] = {}
        for tensor in carried:
            born = self._born[tensor]
            if self._part.after_ops and born.step == self._part.number - 1:
                next_alias = place.get((born.ordinal, born.alloc.bytes))
                if next_alias is not None:
                    next_aliases[tensor] = next_alias
        left: defaultdict[tuple[int, str], deque[int]] = defaultdict(deque)
        for tensor in sorted(set(made) - set(next_aliases.values())):
            left[self._like(tensor)].append(tensor)
        for tensor in carried:
            if tensor not in next_aliases and left[self._like(tensor)]:
                next_aliases[tensor] = left[self._like(tensor)].popleft()
        return next_aliases

    def _like(self, tensor: int) -> tuple[int, str]:
        alloc = self._born[tensor].alloc
        return alloc.bytes, alloc.tag


def _medians(events: list[Event]) -> dict[str, float]:
    """Return the median time of ops by name, for ops without a time."""
    if all(event.us is not None for event in events if type(event) is Op):
        return {}
    times: defaultdict[str, list[float]] = defaultdict(list)
    for event in events:
        if type(event) is Op and event.us is not None:
            times[event.name].append(event.us)
    return {name: median(of_name) for name, of_name in times.items()}
