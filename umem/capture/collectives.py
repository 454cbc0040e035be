"""The collectives of a program: the bytes that ranks exchange, and their overlap with compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch

from ..base.nodes import Node
from ..trace.ids import BlockId
from ..trace.schema import Event, Free, Op, Step
from . import op_semantics
from .op_semantics import OpSemantics
from .recording import Clock, Exchange, OpCost

# A ring of N ranks passes (N - 1) / N of the bytes over each link, and for a sum twice.
_TWICE = {"allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_", "all_reduce_coalesced"}
# One rank has all the bytes, or gets them: they pass each link once.
_WHOLE = {"broadcast", "broadcast_", "reduce_", "send", "recv_", "recv_any_source_", "gather_",
          "scatter_"}  # fmt: skip
_WAITS = ("wait_tensor", "wait_tensors")  # ops of compute that take no time except for the wait
_NO_EXCHANGE = {"barrier", "monitored_barrier_", *_WAITS}
# Fills the gathered tensors; FSDP2 does it on a stream next to compute.
_COPY_IN = "fsdp::all_gather_copy_in"


def exchange_of(operator: OpSemantics, args: Sequence[Any]) -> Exchange | None:
    """Return the bytes that a call sends over a ring of its ranks; None if it sends nothing.

    The larger of what a rank sends and receives counts.
    """
    if not operator.collective or operator.bare in _NO_EXCHANGE:
        return None
    ranks = _ranks(args)
    if len(ranks) < 2:
        return None
    bytes_ = max(map(_bytes, args), default=0)
    if operator.bare in _WHOLE:
        return Exchange(float(bytes_), ranks)
    passes = 2 if operator.bare in _TWICE else 1
    return Exchange(passes * (len(ranks) - 1) / len(ranks) * bytes_, ranks)


def with_node(clock: Clock, node: Node) -> Clock:
    """Return the clock with the times of collectives in a cluster of such nodes."""

    def duration(op: Op, cost: OpCost) -> float:
        if op.name.endswith(_WAITS):
            return 0.0
        return clock(op, cost) if cost.exchange is None else cost.exchange.us(node)

    return duration


def beside_compute(events: Iterable[Event]) -> list[Event]:
    """Return a trace's events with its collectives on a queue next to compute.

    A collective then takes no time itself. The first op that uses its result waits for it, and the
    wait is part of that op's time. It begins when the previous collective is done, its inputs are
    there, and the last awaited result is: programs gather one block ahead.
    """
    queue = _Queue()
    timed: list[Event] = []
    for event in events:
        timed.extend(queue.take(event))
        if isinstance(event, Step):
            queue = _Queue()
    return timed


class _Queue:
    """The time of compute and of concurrent collectives since the begin of a step, in µs."""

    def __init__(self) -> None:
        self._now = 0.0
        self._done = 0.0  # the last collective
        self._waited = 0.0  # when the last of their results was first used
        self._there: dict[BlockId, float] = {}  # when a block's contents are
        self._results: set[BlockId] = set()  # of collectives, not used since

    def take(self, event: Event) -> Iterator[Event]:
        """Yield the events that replace the next one."""
        if isinstance(event, Op):
            yield self._beside(event) if is_beside(event.name) else self._compute(event)
            return
        if isinstance(event, Free):
            self._there.pop(event.id, None)
            self._results.discard(event.id)
        if isinstance(event, Step) and self._done > self._now:
            yield Op("", (), (), self._done - self._now)
        yield event

    def _beside(self, op: Op) -> Op:
        begin = max(self._done, self._waited, self._ready(op.reads))
        self._done = begin + (op.us or 0.0)
        self._there.update(dict.fromkeys(op.writes, self._done))
        self._results.update(op.writes)
        return _lasting(op, 0.0)

    def _compute(self, op: Op) -> Op:
        used = self._results.intersection(op.reads + op.writes)
        wait = max(0.0, self._ready(used) - self._now)
        if used:
            self._results -= used
            self._waited = self._now + wait
        self._now += wait + (op.us or 0.0)
        self._there.update(dict.fromkeys(op.writes, self._now))
        return _lasting(op, wait + (op.us or 0.0)) if wait else op

    def _ready(self, blocks: Iterable[BlockId]) -> float:
        return max((self._there.get(block, 0.0) for block in blocks), default=0.0)


def is_beside(name: str) -> bool:
    """Return whether an op of that name runs on a queue of collectives."""
    if name.endswith(_WAITS):
        return False
    return name.startswith(op_semantics.COLLECTIVES) or name == _COPY_IN


def _lasting(op: Op, us: float) -> Op:
    return Op(op.name, op.reads, op.writes, us, op.flops, op.index, op.family, op.parts, op.extra)


def _ranks(args: Sequence[Any]) -> tuple[int, ...]:
    """Return the ranks of the group among the arguments; none if there is no group."""
    from torch._C._distributed_c10d import _resolve_process_group
    from torch.distributed import distributed_c10d as c10d

    for argument in args:
        if isinstance(argument, str) and argument in c10d._world.pg_names.values():
            return tuple(
                c10d.get_process_group_ranks(_resolve_process_group(cast("Any", argument)))
            )
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return tuple(c10d.get_process_group_ranks(c10d.ProcessGroup.unbox(argument)))
    return ()


def _bytes(argument: Any) -> int:
    tensors = op_semantics.tensors([argument])
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
