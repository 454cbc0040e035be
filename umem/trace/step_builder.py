"""Builds the columns of one step from events."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
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


_OPEN = 1 << 62  # instead of the last op of a tensor that is not freed
_READ, _WRITE = 1, 2


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
    events: list[_Born | Op | Free] = field(default_factory=list)


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
            self._now.events.append(event)  # type: ignore[arg-type]
        elif kind is Alloc:
            self._alloc(event)  # type: ignore[arg-type]
        elif kind is Free:
            self._free(event)  # type: ignore[arg-type]
        else:
            self._step()

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
        yield from (one.alloc if type(one) is _Born else one for one in part.events)  # type: ignore[misc]
        yield Step()

    def _part(self, index: int) -> _Part:
        parts = [*self._done] or [self._now]
        if not -len(parts) <= index < 0:
            raise TraceError(f"step {index} is not kept; kept: -{len(parts)} to -1")
        return parts[index]

    def _alloc(self, alloc: Alloc) -> None:
        if alloc.id in self._live:
            raise TraceError(f"id {alloc.id} is allocated twice without a free between")
        born = _Born(alloc, self._now.number, self._ordinal)
        self._live[alloc.id] = born
        self._now.events.append(born)
        self._ordinal += 1
        self._bytes += device_bytes(alloc.bytes)
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _free(self, free: Free) -> None:
        born = self._live.pop(free.id, None)
        if born is None:
            raise TraceError(f"free of id {free.id}, which is not live")
        self._now.events.append(free)
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
        self._of: dict[int, int] = {}  # the tensor of each live id; -1 if it has no bytes
        self._born: list[_Born] = []
        self._carried = 0  # the first so many were there before the step
        self._families: list[str] = []
        self._first: list[int] = []
        self._last: list[int] = []  # _OPEN: not freed
        self._op_us: list[float] = []
        self._names: list[str] = []
        self._starts = [0]
        self._tensors: list[int] = []
        self._uses: list[int] = []  # of each access: _READ, _WRITE or both
        self._ranges: dict[int, tuple[tuple[int, int], ...]] = {}  # of accesses; without: all
        self._read_first: set[int] = set()  # ids that the first op reads
        self._idle_us = 0.0  # of ops without accesses, until the next one with some

    def build(self) -> StepTrace:
        """Return the columns of the part."""
        for born in self._part.live.values():
            self._tensor(born)
        self._carried = len(self._born)
        for event in self._part.events:
            if type(event) is Op:
                self._op(event)
            elif type(event) is Free:
                self._free(event.id)
            else:
                self._tensor(event)  # type: ignore[arg-type]
        if not self._op_us:
            raise TraceError("the step has no op that accesses memory; nothing to plan")
        self._op_us[-1] += self._idle_us
        return self._columns()

    def _tensor(self, born: _Born) -> None:
        if born.alloc.bytes == 0:
            self._of[born.alloc.id] = -1
            return
        self._of[born.alloc.id] = len(self._born)
        self._born.append(born)
        self._families.append(born.alloc.family)
        self._first.append(len(self._op_us))
        self._last.append(_OPEN)

    def _free(self, block: int) -> None:
        tensor = self._of.pop(block)
        if tensor < 0:
            return
        now = len(self._op_us)
        # A block that an op allocates and frees has its events before the op, and is live in it.
        inside = tensor >= self._carried and self._first[tensor] == now
        self._last[tensor] = now if inside else now - 1

    def _op(self, op: Op) -> None:
        of = self._of
        accesses: dict[int, int] = {}
        try:
            for block in op.reads:
                accesses[of[block]] = _READ
            for block in op.writes:
                tensor = of[block]
                accesses[tensor] = accesses.get(tensor, 0) | _WRITE
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
            self._inherit(op)
        self._op_us.append(us + self._idle_us)
        self._idle_us = 0.0
        self._names.append(op.name)
        if op.parts:
            used = self._used(op)
            for access, tensor in enumerate(accesses, len(self._tensors)):
                if tensor in used:
                    self._ranges[access] = used[tensor]
        self._tensors.extend(accesses)
        self._uses.extend(accesses.values())
        self._starts.append(len(self._tensors))

    @cached_property
    def _medians(self) -> dict[str, float]:
        """The median time of ops by name, for ops without a time."""
        times: defaultdict[str, list[float]] = defaultdict(list)
        for event in self._part.events:
            if type(event) is Op and event.us is not None:
                times[event.name].append(event.us)
        return {name: median(of_name) for name, of_name in times.items()}

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

    def _inherit(self, op: Op) -> None:
        """Give the op's family to what it made, unless that has one."""
        now = len(self._op_us)
        for block in op.writes:
            tensor = self._of[block]
            made = tensor >= self._carried and self._first[tensor] == now
            if made and not self._families[tensor]:
                self._families[tensor] = op.family

    def _lifetimes(self) -> tuple[Ints, Ints, Ints]:
        """Return kind, first and last op of each tensor, now that the remaining ones are known."""
        last_op = len(self._op_us) - 1
        count = len(self._born)
        there = np.arange(count) < self._carried
        ended = np.array(self._last, np.int64)
        stays = ended == _OPEN
        first = np.minimum(np.array(self._first, np.int64), last_op)
        persists = there.copy()
        if self._part.number == 0:
            always = [born.alloc.tag in ALWAYS_THERE for born in self._born]
            persists |= np.array(always, np.bool_)
            persists[self._before_first_op()] = True
        kind = np.where(
            stays,
            np.where(persists, Kind.PERSISTENT, Kind.MADE),
            np.where(there, Kind.CARRIED, Kind.TRANSIENT),
        )
        return kind, np.where(kind == Kind.PERSISTENT, 0, first), np.minimum(ended, last_op)

    def _before_first_op(self) -> list[int]:
        """Return the tensors that existed before the first op: not made by it, but allocated."""
        end = self._starts[1]
        made = {
            tensor
            for tensor, use in zip(self._tensors[:end], self._uses[:end], strict=True)
            if use & _WRITE and self._born[tensor].alloc.id not in self._read_first
        }
        return [t for t, first in enumerate(self._first) if first == 0 and t not in made]

    def _columns(self) -> StepTrace:
        kind, first, last = self._lifetimes()
        # Tensors freed before the first op are live in no op.
        kept = np.flatnonzero(last >= 0)
        new = np.full(len(last), -1, np.int64)
        new[kept] = np.arange(len(kept))
        allocs = [self._born[t].alloc for t in kept.tolist()]
        asked = np.array([alloc.bytes for alloc in allocs], np.int64)
        taken, large = on_device(asked)
        tensors = new[np.array(self._tensors, np.int64)]
        uses = np.array(self._uses, np.int64)
        part, parts = self._parts()
        next_alias = np.full(len(last), -1, np.int64)
        for tensor, alias in self._next_aliases(kind).items():
            next_alias[tensor] = new[alias]
        return StepTrace(
            op_us=np.array(self._op_us, np.float64),
            op_names=tuple(self._names),
            bytes=taken,
            large=large,
            tags=tuple([alloc.tag for alloc in allocs]),
            families=tuple([self._families[t] for t in kept.tolist()]),
            kind=kind[kept],
            first=first[kept],
            last=last[kept],
            next_alias=next_alias[kept],
            source=np.array([alloc.id for alloc in allocs], np.int64),
            access_start=np.array(self._starts, np.int64),
            access_tensor=tensors,
            access_write=(uses & _WRITE) > 0,
            access_read=(uses & _READ) > 0,
            access_part=part,
            parts=parts,
            cut=self._pieces(asked, large, tensors),
        )

    def _parts(self) -> tuple[Ints | None, Parts | None]:
        """Return what each access is of, and the sets that this names."""
        if not self._ranges:
            return None, None
        number = {ranges: i for i, ranges in enumerate(dict.fromkeys(self._ranges.values()))}
        rows = [row for ranges in number for row in ranges]
        begin, end = np.array(rows, np.int64).T
        start = np.concatenate(([0], np.cumsum([len(ranges) for ranges in number])))
        part = np.full(len(self._tensors), -1, np.int64)
        for access, ranges in self._ranges.items():
            part[access] = number[ranges]
        return part, Parts(start.astype(np.int64), begin, end)

    def _pieces(self, asked: Ints, large: Bools, tensors: Ints) -> Ints | None:
        """Return the bytes of the pieces that each tensor is cut into; None: 64 MiB each."""
        used: dict[int, int] = {}  # the least that an access is of
        for access, ranges in self._ranges.items():
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

    def _next_aliases(self, kind: Ints) -> dict[int, int]:
        """Match each CARRIED tensor with its MADE tensor, where there is one.

        In steady state it is the one with the same ordinal among its step's allocations. The
        others are matched by order among those of equal bytes and tag: the steps differ a little,
        or the one before was not recorded.
        """
        made = np.flatnonzero(kind == Kind.MADE).tolist()
        carried = np.flatnonzero(kind == Kind.CARRIED).tolist()
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
