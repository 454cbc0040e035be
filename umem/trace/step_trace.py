"""A columnar trace of one step, as policies and bounds read it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..base.native import core
from ..base.units import PAGE_BYTES, PIECE_BYTES
from .ids import BlockId, TensorIndex

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


Kind = core.Kind
_T = TypeVar("_T")


# Rows of accesses and pieces that a tensor used in parts may take, and its least number of pieces.
_ROWS_OF_PIECES, _PIECES_AT_LEAST = 1 << 22, 16


def _read_only(value: _T) -> _T:
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    elif isinstance(value, Gaps | HostUpdates | Parts):  # no tuple of each operator's name
        for part in vars(value).values() if isinstance(value, Gaps) else value:
            _read_only(part)
    return value


if TYPE_CHECKING:
    _column = cached_property
else:

    def _column(of: Callable[[object], _T]) -> cached_property:
        return cached_property(functools.wraps(of)(lambda step: _read_only(of(step))))


@dataclass(frozen=True)
class Gaps:
    """Idle intervals: two accesses of a tensor with none between them. Columns of equal length.

    The last access of a PERSISTENT tensor in the step and the first one in the next step are a gap
    too: then `end` is at or beyond the number of ops, as an op of the next step.
    """

    tensor: Ints
    start: Ints  # op of the earlier access
    end: Ints  # op of the later one, above `start`
    idle_us: Floats  # from the end of op `start` to the start of op `end`, without any stall


class HostUpdates(NamedTuple):
    """Parameters that the host updates, in rows.

    After its last op in the step the gradient moves to the host and is freed; so does the
    parameter, which no op writes. The host takes `us` for the update. Then the parameter returns.
    A row without a parameter, in a step of pieces, is another piece of a gradient.
    """

    parameter: Ints  # a PERSISTENT tensor; -1: none
    gradient: Ints  # a TRANSIENT one
    us: Floats  # of the host's one lane


class Parts(NamedTuple):
    """Sets of byte ranges of a tensor; set s has the ranges start[s] up to start[s + 1]."""

    start: Ints  # [sets + 1]
    begin: Ints
    end: Ints

    def of(self, which: int) -> tuple[Ints, Ints]:
        """Return where the ranges of a set begin, and where they end."""
        rows = slice(int(self.start[which]), int(self.start[which + 1]))
        return self.begin[rows], self.end[rows]


@dataclass(frozen=True, eq=False)
class StepTrace:
    """A step in steady state: n ops in program order, m tensors.

    A tensor is alive in the ops `first` to `last`, both included. Sizes are in bytes, times in µs.
    All policies share its arrays, which are read-only: copy one to change it.
    `bytes` is the tensor's size on the device. A large tensor (2 MiB and more as requested) takes
    whole pages of 2 MiB and is moved alone; a small one takes its requested size rounded up to
    256 B and shares a page with others.
    """

    op_us: Floats  # [n] duration
    op_names: tuple[str, ...]  # [n]
    bytes: Ints  # [m]
    large: Bools  # [m]
    tags: tuple[str, ...]  # [m] param, grad, optimizer, activation, input, workspace, temp, comm
    families: tuple[str, ...]  # [m] category of the op that made it: conv, linear, norm, ...
    kind: Ints  # [m] Kind
    first: Ints  # [m]
    last: Ints  # [m]
    next_alias: Ints  # [m] of a CARRIED tensor the index of its MADE one; else -1
    source: Ints  # [m] the id in the trace
    access_start: Ints  # [n + 1] the accesses of op i are access_start[i] up to access_start[i + 1]
    access_tensor: Ints  # each tensor at most once per op
    access_write: Bools  # whether the op writes it
    # Only in a step of `pieces`: the tensor of the whole step that each piece belongs to, and its
    # offset there in bytes. None: the tensors are whole.
    whole: Ints | None = None  # [m]
    offset: Ints | None = None  # [m]
    exempt: Bools | None = None  # [m] the program asked to leave it in place; None: no tensor
    # True if the op needs the previous contents, which it does not if it overwrites them all. None:
    # every access does.
    access_read: Bools | None = None
    # [m] The address of a segment of small tensors (`with_segments`), the same in all its lives; 0
    # for a tensor. None: there are no segments.
    place: Ints | None = None
    updates: HostUpdates | None = None  # None: no parameter is updated by the host
    # The part of its tensor that each access uses: a set of `parts`; -1: all. None: always all.
    access_part: Ints | None = None
    parts: Parts | None = None
    # [m] The bytes of a tensor's pieces; smaller where operators use parts of such blocks. None:
    # 64 MiB each.
    cut: Ints | None = None

    def __post_init__(self) -> None:
        for column in vars(self).values():
            _read_only(column)

    @property
    def n_ops(self) -> int:
        """Number of ops."""
        return len(self.op_us)

    @property
    def n_tensors(self) -> int:
        """Number of tensors."""
        return len(self.bytes)

    @_column
    def movable(self) -> Bools:
        """[m] True if a plan can move it: it is large, and the program did not ask to leave it."""
        return self.large if self.exempt is None else self.large & ~self.exempt

    @_column
    def access_op(self) -> Ints:
        """[k] Op of each access."""
        return np.repeat(np.arange(self.n_ops), np.diff(self.access_start))

    @_column
    def begin_us(self) -> Floats:
        """[n + 1] Start of each op without any stall; the last entry is the step's compute time."""
        return np.concatenate(([0.0], np.cumsum(self.op_us)))

    @_column
    def begin_twice_us(self) -> Floats:
        """[2 n + 1] The same for two steps in a row."""
        return np.concatenate((self.begin_us, self.begin_us[1:] + self.compute_us))

    @property
    def compute_us(self) -> float:
        """Total time of all ops."""
        return float(self.begin_us[-1])

    @_column
    def use_order(self) -> Ints:
        """[k] Accesses sorted by tensor, and by op within a tensor."""
        return np.lexsort((self.access_op, self.access_tensor))

    @_column
    def use_start(self) -> Ints:
        """[m + 1] The accesses of tensor t are use_order[use_start[t]] up to use_start[t + 1]."""
        counts = np.bincount(self.access_tensor, minlength=self.n_tensors)
        return np.concatenate(([0], np.cumsum(counts)))

    def block_of(self, tensor: TensorIndex) -> BlockId:
        """Return the tensor's block in the trace."""
        return BlockId(int(self.source[tensor]))

    def uses_of(self, tensor: int) -> Ints:
        """Return the accesses of the tensor, by op."""
        return self.use_order[self.use_start[tensor] : self.use_start[tensor + 1]]

    def uses(self, tensor: int) -> Ints:
        """Return the ops that access the tensor, ascending."""
        return self.access_op[self.uses_of(tensor)]

    @_column
    def gaps(self) -> Gaps:
        """All gaps, of large and small tensors, that have at least one op inside."""
        tensor = self.access_tensor[self.use_order]
        op = self.access_op[self.use_order]
        inner = np.flatnonzero(tensor[1:] == tensor[:-1])
        used = np.flatnonzero(np.diff(self.use_start) > 0)
        around = used[self.kind[used] == Kind.PERSISTENT]
        tensors = np.concatenate((tensor[inner], around))
        start = np.concatenate((op[inner], op[self.use_start[around + 1] - 1]))
        end = np.concatenate((op[inner + 1], op[self.use_start[around]] + self.n_ops))
        keep = end - start > 1
        tensors, start, end = tensors[keep], start[keep], end[keep]
        begin = self.begin_twice_us
        return Gaps(tensors, start, end, begin[end] - begin[start + 1])

    @_column
    def pieces(self) -> StepTrace:
        """Step of the same ops with large tensors in pieces of at most 64 MiB, which move alone.

        The pieces of a tensor are adjacent and take its place in the order. An access uses the
        pieces that overlap with the part that it uses.
        """
        if self.whole is not None:
            return self
        size = np.full(self.n_tensors, PIECE_BYTES) if self.cut is None else self.cut
        counts = np.where(self.large, -(-self.bytes // size), 1)
        counts = np.maximum(counts, 1)
        first = np.cumsum(counts) - counts
        within = np.arange(counts.sum()) - np.repeat(first, counts)
        return self._divided(counts, within * np.repeat(size, counts))

    @property
    def in_parts(self) -> StepTrace:
        """The same step, in pieces if ops use parts of its tensors: an op needs all of each."""
        return self if self.access_part is None else self.pieces

    @_column
    def in_exact_parts(self) -> StepTrace:
        """Step of the same ops with large tensors divided where a part of one begins or ends.

        No schedule moves less than the parts that ops use, whatever its pieces are. A tensor that
        is used in many parts is divided at some of them only, and a use counts for the pieces that
        are wholly in its part.
        """
        if self.access_part is None or self.parts is None:
            return self
        counts = np.ones(self.n_tensors, np.int64)
        # A carried tensor is divided like the tensor that takes its place.
        root = np.where(self.next_alias < 0, np.arange(self.n_tensors), self.next_alias)
        at: defaultdict[int, set[int]] = defaultdict(set)
        named = self.access_part >= 0
        uses = np.stack((root[self.access_tensor[named]], self.access_part[named]), axis=1)
        for tensor, part in np.unique(uses, axis=0).tolist():
            for bounds in self.parts.of(part):
                at[tensor].update(bounds.tolist())
        divided = np.flatnonzero(self.large & np.isin(root, list(at))).tolist()
        uses_of = np.bincount(root[self.access_tensor], minlength=self.n_tensors)
        places: dict[int, list[int]] = {}
        for tensor in divided:
            inside = sorted(b for b in at[int(root[tensor])] if 0 < b < self.bytes[tensor])
            most = max(_PIECES_AT_LEAST, _ROWS_OF_PIECES // int(uses_of[root[tensor]]))
            places[tensor] = [0, *inside[:: -(-len(inside) // most) or 1]]
            counts[tensor] = len(places[tensor])
        first = np.cumsum(counts) - counts
        offset = np.zeros(counts.sum(), np.int64)
        for tensor, found in places.items():
            offset[first[tensor] : first[tensor] + len(found)] = found
        return self._divided(counts, offset, wholly=True)

    def _divided(self, counts: Ints, offset: Ints, *, wholly: bool = False) -> StepTrace:
        """Return the step with `counts` pieces of each tensor, which begin at these offsets.

        An op that uses a part of a tensor uses the pieces that it overlaps, or those in it wholly.
        """
        base = np.concatenate(([0], np.cumsum(counts)))
        whole = np.repeat(np.arange(self.n_tensors), counts)
        place = np.arange(base[-1]) - base[whole]
        end = np.append(offset[1:], 0)
        end[base[1:] - 1] = self.bytes
        next_alias = np.where(self.next_alias[whole] < 0, -1, base[self.next_alias[whole]] + place)
        spread = counts[self.access_tensor]
        access = np.repeat(np.arange(len(self.access_tensor)), spread)
        within = np.arange(len(access)) - (np.cumsum(spread) - spread)[access]
        used = self._used(access, base, offset, end, wholly)
        access, within = access[used], within[used]
        spread = np.bincount(access, minlength=len(spread))
        return replace(
            self,
            bytes=end - offset,
            large=self.large[whole],
            tags=tuple(map(self.tags.__getitem__, whole.tolist())),
            families=tuple(map(self.families.__getitem__, whole.tolist())),
            kind=self.kind[whole],
            first=self.first[whole],
            last=self.last[whole],
            next_alias=next_alias,
            source=self.source[whole],
            access_start=np.concatenate(([0], np.cumsum(spread)))[self.access_start],
            access_tensor=base[self.access_tensor[access]] + within,
            access_write=self.access_write[access],
            access_read=None if self.access_read is None else self.access_read[access],
            whole=whole,
            offset=offset,
            exempt=None if self.exempt is None else self.exempt[whole],
            place=None if self.place is None else self.place[whole],
            updates=None if self.updates is None else _cut(self.updates, base, end - offset),
            access_part=None,
            parts=None,
            cut=None if self.cut is None else self.cut[whole],
        )

    def _used(self, access: Ints, base: Ints, begin: Ints, end: Ints, wholly: bool) -> Bools:
        """Return whether each access uses some of each piece of its tensor, or all of it."""
        used = np.ones(len(access), bool)
        if self.access_part is None or self.parts is None:
            return used
        starts = np.searchsorted(access, np.arange(len(self.access_part) + 1))
        for a in np.flatnonzero(self.access_part >= 0).tolist():
            tensor = int(self.access_tensor[a])
            pieces = slice(int(base[tensor]), int(base[tensor + 1]))
            first, last = (bounds[:, None] for bounds in self.parts.of(int(self.access_part[a])))
            if wholly:
                inside = (first <= begin[pieces]) & (last >= end[pieces])
            else:
                inside = (first < end[pieces]) & (last > begin[pieces])
            used[starts[a] : starts[a + 1]] = inside.any(axis=0)
        return used

    @property
    def is_segment(self) -> Bools:
        """[m] True if it is a segment of small tensors, and no tensor."""
        return np.zeros(self.n_tensors, bool) if self.place is None else self.place > 0

    @_column
    def allocations(self) -> Ints:
        """Large tensors without segments, in the order in which the step allocates them."""
        before = np.isin(self.kind, (Kind.PERSISTENT, Kind.CARRIED)) | self.is_segment
        inside = np.flatnonzero(self.large & ~before)
        return inside[np.argsort(self.first[inside], kind="stable")]

    @_column
    def made_elsewhere(self) -> Ints:
        """Large tensors that the step frees and does not make: another kind of step made them."""
        alone = self.large & ~self.is_segment & (self.next_alias < 0)
        return np.flatnonzero(alone & (self.kind == Kind.CARRIED))

    @_column
    def working_set(self) -> Ints:
        """[n] Bytes of all tensors that each op accesses, or of the pieces that hold its parts."""
        return self.in_parts.sum_of_accesses(self.in_parts.bytes)

    @_column
    def live_bytes(self) -> Ints:
        """[n] Bytes of all tensors alive in each op."""
        return self.live_bytes_of(np.ones(self.n_tensors, bool))

    @_column
    def small_bytes(self) -> int:
        """Peak of the bytes of small tensors, in whole pages."""
        peak = int(self.live_bytes_of(~self.large).max(initial=0))
        return -(-peak // PAGE_BYTES) * PAGE_BYTES

    def live_bytes_of(self, these: Bools) -> Ints:
        """Return the bytes of these tensors, of [m], that are alive in each op, [n]."""
        change = np.zeros(self.n_ops + 1, np.int64)
        np.add.at(change, self.first[these], self.bytes[these])
        np.add.at(change, self.last[these] + 1, -self.bytes[these])
        return np.cumsum(change)[:-1]

    @property
    def peak_bytes(self) -> int:
        """Peak of live bytes."""
        return int(self.live_bytes.max(initial=0))

    @_column
    def clean(self) -> Bools:
        """[m] Persistent tensors that no op of the step writes: a copy on the host stays valid."""
        clean: Bools = self.kind == Kind.PERSISTENT
        clean[self.access_tensor[self.access_write]] = False
        return clean

    def sum_of_accesses(self, amount: Ints) -> Ints:
        """Sum `amount` [m] over the tensors that each op accesses: [n]."""
        total = np.zeros(self.n_ops, np.int64)
        np.add.at(total, self.access_op, amount[self.access_tensor])
        return total


def _cut(updates: HostUpdates, base: Ints, size: Ints) -> HostUpdates:
    """Cut updates into pieces: `base` is the first piece of each tensor, `size` that of a piece."""
    rows: list[tuple[int, int, float]] = []
    for parameter, gradient, us in zip(*(column.tolist() for column in updates), strict=True):
        pieces = range(int(base[parameter]), int(base[parameter + 1]))
        parts = range(int(base[gradient]), int(base[gradient + 1]))
        total = int(size[pieces.start : pieces.stop].sum())
        # A piece needs the gradient up to the same share of it.
        ends = [-(-(i + 1) * len(parts) // len(pieces)) - 1 for i in range(len(pieces))]
        rows += [
            (p, parts[end], us * int(size[p]) / total) for p, end in zip(pieces, ends, strict=True)
        ]
        rows += [(-1, part, 0.0) for i, part in enumerate(parts) if i not in ends]
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    return HostUpdates(
        np.array(columns[0], np.int64),
        np.array(columns[1], np.int64),
        np.array(columns[2], np.float64),
    )
