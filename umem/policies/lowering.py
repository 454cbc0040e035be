"""A plan as the native engine reads it: in columns, with large tensors and counted ops only.

The engine counts only ops that use at least one large tensor. Small tensors move with the segments
that they share. Between two counted ops, the engine acts at the end of the later one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from ..base.units import PIECE_BYTES
from ..errors import PlanError
from ..trace.ids import TensorIndex
from ..trace.step_trace import Bools, Ints, Kind, StepTrace
from .base import Entries, Entry, Fetch, Move, Plan, WriteBack
from .plan_check import out_of_range


class NothingToPlanError(PlanError):
    """No op of the step uses a tensor of 2 MiB or more."""


ORDERS = {"lru": 0, "fifo": 1, "furthest": 2}
Columns = dict[str, Ints | int]


def lower(plan: Plan, address: Callable[[TensorIndex], int], *, alone: bool = False) -> Columns:
    """Return the plan's columns for `_core.install_plan`.

    `address` returns the address of a whole tensor of the step, or 0 if it is unknown. It is called
    for the large tensors that are alive at the begin of a step, and the addresses have to be valid
    at the begin of the step in which the plan is installed. An entry for a tensor applies to all
    its pieces.

    An entry for an op that does not count applies to the next op that does, or to the last one.
    Only persistent tensors of `read_mostly` that no op writes are kept: the driver is advised of
    them, and they leave without a transfer once they have come from the host.

    A segment of small tensors is at its `place`, and is not part of the order of allocations.
    Tensors that another kind of step made become known when the step uses them. A step that is
    `alone`, as in a replay, has no other kind: it begins with the allocation of these tensors.

    Raises:
        PlanError: the plan names an op or a tensor that the step does not have, or a number in it
            is out of range.
        NothingToPlanError: the trace has no access to a large tensor.
    """
    problem = out_of_range(plan)
    if problem:
        raise PlanError(f"the plan is refused: {problem}")
    plan = _in_pieces(plan)
    trace = plan.trace
    ops = _Ops(trace)
    if ops.count == 0:
        raise NothingToPlanError("no op uses a tensor of 2 MiB or more: there is nothing to plan")
    large = np.flatnonzero(trace.large)
    tensor = np.full(trace.n_tensors + 1, -1, np.int64)  # -1, no tensor, stays -1
    tensor[large] = np.arange(len(large))
    allocations = trace.allocations
    if alone:
        allocations = np.concatenate((trace.made_elsewhere, allocations))
    known = (trace.kind == Kind.PERSISTENT) | (trace.kind == Kind.CARRIED)
    return {
        "n_ops": ops.count,
        "bytes": trace.bytes[large],
        "kind": trace.kind[large],
        "next_alias": tensor[trace.next_alias[large]],
        "address": _addresses(trace, large, known, address),
        "segment": trace.is_segment[large].astype(np.int64),
        "allocations": tensor[allocations],
        "allocated": ops.after(np.where(trace.kind == Kind.CARRIED, 0, trace.first)[allocations]),
        **ops.accesses(tensor),
        **_moves("evict", plan.evict, ops, tensor),
        **_moves("cold", plan.evict_first, ops, tensor),
        **_spans("fetch", "by", plan.fetch, ops, tensor),
        **_spans("copy", "until", plan.write_back, ops, tensor),
        "keep": _of_large(np.array(plan.retain, np.int64), tensor),
        "read_mostly": _of_large(_clean(plan), tensor),
        "cut": _cut_blocks(trace),
        "waits": ops.after(np.array(plan.barriers, np.int64)),
        "occupancy": ops.most(plan),
        "gated": int(plan.gated),
        "capacity": plan.capacity,
        "order": ORDERS[plan.order],
        "window": plan.window,
        "headroom": plan.headroom,
    }


def _in_pieces(plan: Plan) -> Plan:
    """Cut the plan into pieces; return a plan of a step in pieces as it is."""
    if plan.trace.whole is not None:
        return plan
    trace = plan.trace.pieces
    assert trace.whole is not None
    first = np.searchsorted(trace.whole, np.arange(plan.trace.n_tensors + 1))

    def cut(kind: type[Entry], entries: Sequence[Entry]) -> Entries[Entry]:
        rows = np.asarray(entries, np.int64).reshape(-1, len(kind._fields))
        tensor = rows[:, -1]
        row, piece = _spread(first[tensor], first[tensor + 1])
        return Entries(kind, *rows[row, :-1].T, piece)

    def cut_all(tensors: tuple[int, ...]) -> tuple[int, ...]:
        whole = np.array(tensors, np.int64)
        return tuple(_spread(first[whole], first[whole + 1])[1].tolist())

    return replace(
        plan,
        trace=trace,
        evict=cut(Move, plan.evict),
        evict_first=cut(Move, plan.evict_first),
        fetch=cut(Fetch, plan.fetch),
        write_back=cut(WriteBack, plan.write_back),
        retain=cut_all(plan.retain),
        read_mostly=cut_all(plan.read_mostly),
    )


def _spread(begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return the rows of the numbers from each begin up to its end, and these numbers."""
    count = end - begin
    row = np.repeat(np.arange(len(count)), count)
    return row, np.arange(len(row)) - (np.cumsum(count) - count)[row] + begin[row]


def _addresses(
    trace: StepTrace, large: Ints, known: Bools, address: Callable[[TensorIndex], int]
) -> Ints:
    """Return the address of each large piece; 0 if it is not known."""
    assert trace.whole is not None
    assert trace.offset is not None
    whole = trace.whole[large]
    asked = np.unique(whole[(known & ~trace.is_segment)[large]])
    base = np.zeros(int(trace.whole[-1]) + 1, np.int64)
    base[asked] = _column(address(TensorIndex(t)) for t in asked.tolist())
    found = np.where(base[whole] > 0, base[whole] + trace.offset[large], 0)
    return found if trace.place is None else np.maximum(found, trace.place[large])


class _Ops:
    """The map from the ops of a trace to those that count."""

    def __init__(self, trace: StepTrace) -> None:
        self.trace = trace
        self.of_large = trace.large[trace.access_tensor]
        counts = np.zeros(trace.n_ops, bool)
        counts[trace.access_op[self.of_large]] = True
        self.counts, self.count = counts, int(counts.sum())
        # [n] The counted op at whose end the engine sees that op i has ended.
        self.index = np.minimum(np.cumsum(counts) - counts, self.count - 1).astype(np.int64)

    def after(self, op: Ints) -> Ints:
        """Return the counted op for each op, -1 for -1."""
        return np.where(op < 0, -1, self.index[np.maximum(op, 0)])

    def by(self, op: Ints) -> Ints:
        """Return the same for ops that may lie in the next step."""
        n = self.trace.n_ops
        counted: Ints = self.index[op % n] + op // n * self.count
        return counted

    def accesses(self, tensor: Ints) -> Columns:
        from ..base.native import core

        op = self.index[self.trace.access_op[self.of_large]]
        counts = np.bincount(op, minlength=self.count)
        start = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        of_large: Ints = tensor[self.trace.access_tensor[self.of_large]]
        names = [self.trace.op_names[i] for i in np.flatnonzero(self.counts).tolist()]
        number = {name: core.number_of_op(name) for name in set(names)}
        op = np.array([number[name] for name in names], np.int64)
        return {"access_start": start, "access_tensor": of_large, "op": op}

    def most(self, plan: Plan) -> Ints:
        """Return the maximum occupancy of each counted op and the uncounted ones before it."""
        if plan.occupancy is None:
            return np.zeros(0, np.int64)
        first = np.searchsorted(self.index, np.arange(self.count))
        return np.maximum.reduceat(plan.occupancy, first)


def _cut_blocks(trace: StepTrace) -> Ints:
    """Return the sizes of blocks that are cut into pieces of less than 64 MiB."""
    if trace.cut is None or trace.whole is None:
        return np.zeros(0, np.int64)
    size = np.bincount(trace.whole, trace.bytes).astype(np.int64)
    return np.unique(size[trace.whole[trace.large & (trace.cut < PIECE_BYTES)]])


def _column(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


def _of_large(tensors: Ints, tensor: Ints) -> Ints:
    mapped: Ints = tensor[tensors]
    return mapped[mapped >= 0]


def _clean(plan: Plan) -> Ints:
    tensors = np.array(plan.read_mostly, np.int64)
    return tensors[plan.trace.clean[tensors]]


def _moves(name: str, moves: Sequence[Move], ops: _Ops, tensor: Ints) -> Columns:
    rows = np.asarray(moves, np.int64).reshape(-1, 2)
    rows = rows[tensor[rows[:, 1]] >= 0]
    return {f"{name}_after": ops.after(rows[:, 0]), f"{name}_tensor": tensor[rows[:, 1]]}


def _spans(
    name: str, end: str, items: Sequence[Fetch] | Sequence[WriteBack], ops: _Ops, tensor: Ints
) -> Columns:
    """Return the columns of entries from the end of one op to the begin of another."""
    rows = np.asarray(items, np.int64).reshape(-1, 3)
    rows = rows[tensor[rows[:, 2]] >= 0]
    after, until = ops.after(rows[:, 0]), ops.by(rows[:, 1])
    ahead = until > after  # else there is nothing between the two
    return {
        f"{name}_after": after[ahead],
        f"{name}_{end}": until[ahead],
        f"{name}_tensor": tensor[rows[ahead, 2]],
    }
