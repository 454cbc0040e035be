"""One step of a program in columns, as policies and bounds read it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..values import PAGE_BYTES, PIECE_BYTES

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Kind(IntEnum):
    """How a tensor's life lies in the step. The step repeats: its end is followed by its start."""

    PERSISTENT = 0  # alive all the time: weights, optimizer states
    TRANSIENT = 1  # allocated and freed inside the step
    MADE = 2  # allocated in the step, freed in a later one
    CARRIED = 3  # the same tensor in the next step, until its free: its `twin` is the MADE one


@dataclass(frozen=True)
class Gaps:
    """Idle intervals: two accesses of one tensor with none between. Columns of equal length.

    Of a PERSISTENT tensor the last access of the step and the first of the next one are a gap too:
    then `end` is at or beyond the number of ops, in the ops of the next step.
    """

    tensor: Ints
    start: Ints  # op of the earlier access
    end: Ints  # op of the later one, above `start`
    idle_us: Floats  # from the end of op `start` to the begin of op `end`, without any stall


@dataclass(frozen=True, eq=False)
class StepTrace:
    """One step in steady state: n ops in program order, m tensors.

    A tensor is alive in the ops `first` to `last`, both included. Sizes are in bytes, times in µs.
    `bytes` is what the tensor takes on the device: whole pages of 2 MiB for a large one (2 MiB and
    more as asked for), which is moved alone; what was asked for, rounded up to 256 B, for a small
    one, which shares a page with others.
    """

    op_us: Floats  # [n] duration
    op_names: tuple[str, ...]  # [n]
    bytes: Ints  # [m]
    large: Bools  # [m]
    tags: tuple[str, ...]  # [m] param, grad, optimizer, activation, input, workspace, temp, comm
    families: tuple[str, ...]  # [m] of the op that made it: conv, linear, norm, ...
    kind: Ints  # [m] Kind
    first: Ints  # [m]
    last: Ints  # [m]
    twin: Ints  # [m] of a CARRIED tensor the index of its MADE one; else -1
    source: Ints  # [m] the id in the trace
    access_start: Ints  # [n + 1] the accesses of op i are access_start[i] up to access_start[i + 1]
    access_tensor: Ints  # a tensor once an op
    access_write: Bools  # whether the op writes it; it reads what it does not write whole, and more
    # Of a step in pieces (`pieces`): which tensor of the whole step each one is a piece of, and
    # where in it, in bytes. None: the tensors are whole.
    whole: Ints | None = None  # [m]
    offset: Ints | None = None  # [m]
    stays: Bools | None = None  # [m] the program wants it left where it is; None: nothing of it

    @property
    def n_ops(self) -> int:
        """How many ops."""
        return len(self.op_us)

    @property
    def n_tensors(self) -> int:
        """How many tensors."""
        return len(self.bytes)

    @property
    def movable(self) -> Bools:
        """[m] Whether a plan can move it: it is large, and not wanted where it is."""
        return self.large if self.stays is None else self.large & ~self.stays

    @cached_property
    def access_op(self) -> Ints:
        """The op of each access."""
        return np.repeat(np.arange(self.n_ops), np.diff(self.access_start))

    @cached_property
    def begin_us(self) -> Floats:
        """[n + 1] When each op begins without any stall; the last is the step's compute time."""
        return np.concatenate(([0.0], np.cumsum(self.op_us)))

    @property
    def compute_us(self) -> float:
        """The time of all ops."""
        return float(self.begin_us[-1])

    @cached_property
    def use_order(self) -> Ints:
        """The accesses sorted by tensor, and by op within a tensor."""
        return np.lexsort((self.access_op, self.access_tensor))

    @cached_property
    def use_start(self) -> Ints:
        """[m + 1] The accesses of tensor t are use_order[use_start[t]] up to use_start[t + 1]."""
        counts = np.bincount(self.access_tensor, minlength=self.n_tensors)
        return np.concatenate(([0], np.cumsum(counts)))

    def uses(self, tensor: int) -> Ints:
        """The ops that access the tensor, ascending."""
        of_tensor = self.use_order[self.use_start[tensor] : self.use_start[tensor + 1]]
        return self.access_op[of_tensor]

    @cached_property
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
        begin = np.concatenate((self.begin_us, self.begin_us[1:] + self.compute_us))
        return Gaps(tensors, start, end, begin[end] - begin[start + 1])

    @cached_property
    def pieces(self) -> StepTrace:
        """The same step, large tensors cut into the pieces of at most 64 MiB that move alone.

        The pieces of a tensor follow each other, where the tensor was in its order.
        """
        if self.whole is not None:
            return self
        counts = np.where(self.large, -(-self.bytes // PIECE_BYTES), 1)
        counts = np.maximum(counts, 1)
        base = np.concatenate(([0], np.cumsum(counts)))
        whole = np.repeat(np.arange(self.n_tensors), counts)
        offset = (np.arange(base[-1]) - base[whole]) * PIECE_BYTES
        cut = np.minimum(self.bytes[whole] - offset, PIECE_BYTES)
        twin = np.where(self.twin[whole] < 0, -1, base[self.twin[whole]] + offset // PIECE_BYTES)
        spread = counts[self.access_tensor]
        access = np.repeat(np.arange(len(self.access_tensor)), spread)
        within = np.arange(len(access)) - (np.cumsum(spread) - spread)[access]
        return replace(
            self,
            bytes=np.where(self.large[whole], cut, self.bytes[whole]),
            large=self.large[whole],
            tags=tuple(map(self.tags.__getitem__, whole.tolist())),
            families=tuple(map(self.families.__getitem__, whole.tolist())),
            kind=self.kind[whole],
            first=self.first[whole],
            last=self.last[whole],
            twin=twin,
            source=self.source[whole],
            access_start=np.concatenate(([0], np.cumsum(spread)))[self.access_start],
            access_tensor=base[self.access_tensor[access]] + within,
            access_write=self.access_write[access],
            whole=whole,
            offset=offset,
            stays=None if self.stays is None else self.stays[whole],
        )

    @cached_property
    def allocations(self) -> Ints:
        """Large tensors in the order in which the step allocates them.

        A carried one that no step makes is allocated where the step begins, as in replay.
        """
        carried = self.kind == Kind.CARRIED
        before = (self.kind == Kind.PERSISTENT) | (carried & (self.twin >= 0))
        inside = np.flatnonzero(self.large & ~before)
        first = np.where(carried, -1, self.first)[inside]
        return inside[np.argsort(first, kind="stable")]

    @cached_property
    def working_set(self) -> Ints:
        """[n] Bytes of all tensors that each op accesses."""
        return self.sum_of_accesses(self.bytes)

    @cached_property
    def live_bytes(self) -> Ints:
        """[n] Bytes of all tensors alive in each op."""
        change = np.zeros(self.n_ops + 1, np.int64)
        np.add.at(change, self.first, self.bytes)
        np.add.at(change, self.last + 1, -self.bytes)
        return np.cumsum(change)[:-1]

    @cached_property
    def small_bytes(self) -> int:
        """The peak of the bytes of small tensors, in whole pages."""
        change = np.zeros(self.n_ops + 1, np.int64)
        small = ~self.large
        np.add.at(change, self.first[small], self.bytes[small])
        np.add.at(change, self.last[small] + 1, -self.bytes[small])
        peak = int(np.cumsum(change).max(initial=0))
        return -(-peak // PAGE_BYTES) * PAGE_BYTES

    @property
    def peak_bytes(self) -> int:
        """The peak of live bytes."""
        return int(self.live_bytes.max(initial=0))

    @cached_property
    def clean(self) -> Bools:
        """[m] Persistent tensors that no op of the step writes: a copy on the host stays valid."""
        clean: Bools = self.kind == Kind.PERSISTENT
        clean[self.access_tensor[self.access_write]] = False
        return clean

    def sum_of_accesses(self, amount: Ints) -> Ints:
        """[n] The sum of `amount` [m] over the tensors that each op accesses."""
        total = np.zeros(self.n_ops, np.int64)
        np.add.at(total, self.access_op, amount[self.access_tensor])
        return total
