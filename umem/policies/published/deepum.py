"""Baseline `deepum`: prefetch by correlation tables learnt from the step before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise

from ...base.device_profiles import DeviceProfile
from ...base.units import PAGE_BYTES
from ...trace.step_trace import Kind, StepTrace
from ..base import Fetch, Plan
from ..default.occupancy import capacity
from .phases import fetch


class DeepUm:
    """Two correlation tables: the next op after an op, and the next block after a block of an op.

    The original learns from page faults in the driver; umem learns from the accesses of each op,
    and a block is a tensor. Ahead of the running op, `degree` ops are followed through the tables
    and the predicted blocks are fetched. The victims are the blocks fetched longest ago, except
    those that the predicted ops need; `watermark` pages are kept free. The tables' sizes are not in
    the paper's abstract, so they are options.

    Source: Jung, Kim and Lee, "DeepUM: tensor migration and prefetching in unified memory", ASPLOS
    2023; the degree is that of its model in Zhang et al., "G10", MICRO 2023.
    """

    name = "deepum"

    def __init__(
        self,
        degree: int = 8,
        successors: int = 4,
        rows: int = 128,
        ways: int = 2,
        watermark: int = 8,
    ) -> None:
        self.degree = degree
        self.successors = successors
        self.rows = rows
        self.ways = ways
        self.watermark = watermark

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:  # noqa: ARG002
        """Return the fetches that the tables predict, in the order of prediction."""
        needed = [_large_of(trace, op) for op in range(trace.n_ops)]
        ids = _ids(trace, needed)
        order = _OpTable(ids)
        blocks = {ident: self._learn(needed[op]) for op, ident in enumerate(ids)}
        fetches: list[Fetch] = []
        asked: dict[int, int] = {}  # by tensor: the op at which it was predicted
        for op in range(trace.n_ops):
            for ahead, ident in enumerate(order.chain(op, self.degree), 1):
                for tensor in blocks[ident].chain():
                    by = op + ahead
                    if asked.get(tensor, op) > op or not _can_be(trace, tensor, op, by):
                        continue
                    asked[tensor] = by
                    fetches.append(fetch(trace, op, by, tensor))
        return Plan(
            trace,
            fetch=tuple(fetches),
            order="fifo",
            window=self.degree,
            headroom=min(self.watermark * PAGE_BYTES, capacity(trace, budget) // 2),
        )

    def _learn(self, tensors: list[int]) -> _BlockTable:
        table = _BlockTable(self.successors, self.rows, self.ways)
        table.learn(tensors)
        return table


class _OpTable:
    """The table of next ops, by the op and the three before it."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids
        self._next = {self._key(op): ids[(op + 1) % len(ids)] for op in range(len(ids))}

    def _key(self, op: int) -> tuple[int, ...]:
        return tuple(self._ids[(op - back) % len(self._ids)] for back in range(4))

    def chain(self, op: int, degree: int) -> Iterator[int]:
        """Yield the ids predicted for the `degree` ops after `op`."""
        key = self._key(op)
        for _ in range(degree):
            ident = self._next.get(key)
            if ident is None:
                return
            yield ident
            key = (ident, *key[:3])


class _BlockTable:
    """The table of next blocks inside one op: sets of rows, each with its recent successors."""

    def __init__(self, successors: int, rows: int, ways: int) -> None:
        self._successors = successors
        self._ways = ways
        self._count = max(1, rows // ways)
        # By number, and only those in use: a table for each op of a long step is kept.
        self._sets: dict[int, OrderedDict[int, list[int]]] = {}
        self._start: int | None = None
        self._end: int | None = None

    def learn(self, blocks: list[int]) -> None:
        """Learn from one run of the op: the blocks it touched, in order."""
        for block, following in pairwise(blocks):
            rows = self._sets.setdefault(block % self._count, OrderedDict())
            row = rows.pop(block, [])
            rows[block] = [following, *(old for old in row if old != following)][: self._successors]
            if len(rows) > self._ways:
                rows.popitem(last=False)
        if blocks:
            self._start, self._end = blocks[0], blocks[-1]

    def chain(self) -> Iterator[int]:
        """Yield the blocks from the first one through the successors to the last one."""
        queue = [] if self._start is None else [self._start]
        seen = set(queue)
        for block in queue:  # the queue grows during the loop
            yield block
            if block == self._end:
                return
            rows = self._sets.get(block % self._count)
            row = rows.get(block, []) if rows else []
            fresh = [following for following in row if following not in seen]
            seen.update(fresh)
            queue += fresh


def _large_of(trace: StepTrace, op: int) -> list[int]:
    begin, end = trace.access_start[op], trace.access_start[op + 1]
    tensors = trace.access_tensor[begin:end]
    found: list[int] = tensors[trace.large[tensors]].tolist()
    return found


def _ids(trace: StepTrace, needed: list[list[int]]) -> list[int]:
    """Return an id for each op by its name and its tensors; equal ops get equal ids."""
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    return [
        known.setdefault((name, tuple(tensors)), len(known))
        for name, tensors in zip(trace.op_names, needed, strict=True)
    ]


def _can_be(trace: StepTrace, tensor: int, op: int, by: int) -> bool:
    """Return whether the tensor has memory from the end of `op` until `by`."""
    if trace.kind[tensor] == Kind.PERSISTENT:
        return True
    return bool(trace.first[tensor] <= op and by <= trace.last[tensor])
