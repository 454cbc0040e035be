"""The record of a program on fake tensors, for any device: events, blocks and op costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from ..base.nodes import Node
from ..trace.ids import BlockId
from ..trace.schema import Alloc, Event, Free, Op, Step


@dataclass
class Block:
    """The facts about a storage that are not in its events; its purpose may be known late."""

    bytes: int
    tag: str
    family: str
    module: str  # that was running when it was made
    on_host: bool = False  # in a program that moves tensors to the device itself
    line: str = ""  # of the program that made it, `file:line`


class Exchange(NamedTuple):
    """The bytes that an op sends to other ranks."""

    bytes: float  # over each link of a ring
    ranks: tuple[int, ...]  # on the ring

    def us(self, node: Node) -> float:
        """Return its time in a cluster of such nodes, on which ranks are in order."""
        nodes = len({rank // node.devices for rank in self.ranks})
        return self.bytes / node.ring_bytes_per_us(len(self.ranks), nodes)


@dataclass(frozen=True, slots=True)
class OpCost:
    """The cost of an op on any device, and its place in the program."""

    module: str
    phase: str  # forward, backward, optimizer
    flops: float
    bytes: int  # that it moves between the device's memory and its cores
    precision: str  # of its products: half, tf32, fp32, fp64
    ordinal: int = -1  # its index into Recording.forward; -1 after the forward pass
    exchange: Exchange | None = None  # with other ranks


# The microseconds that an op takes.
Clock: TypeAlias = Callable[[Op, OpCost], float]


@dataclass
class Recording:
    """The steps of a program: the events of a trace in program order, and tables for them.

    Blocks that are alive when the first step begins come first, without the ops that made them:
    the setup is not part of a step. The events have the facts that are known when they happen.
    `device_events` adds those of the tables: tags, costs, and which blocks are on the host.
    """

    events: list[Event] = field(default_factory=list)
    costs: dict[int, OpCost] = field(default_factory=dict)  # by the index of an Op in `events`
    blocks: dict[BlockId, Block] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)  # where the plan may differ from a run
    steps: int = 0
    # All calls of the last step's forward pass by overload name, including views and asides.
    forward: tuple[str, ...] = ()

    def device_events(self, clock: Clock | None = None) -> list[Event]:
        """Return the events of a trace of the device, with durations from `clock`.

        Without a clock ops have no duration. Host blocks, and ops on them alone, are left out.
        """
        shown = {i for i, block in self.blocks.items() if not block.on_host}
        final: list[Event] = []
        index = 0  # among the ops of the step
        for at, event in enumerate(self.events):
            if isinstance(event, Op):
                if shown.isdisjoint(event.reads + event.writes):
                    continue  # on the host
                cost = self.costs[at]
                final.append(
                    replace(
                        event,
                        reads=tuple(i for i in event.reads if i in shown),
                        writes=tuple(i for i in event.writes if i in shown),
                        us=None if clock is None else clock(event, cost),
                        flops=cost.flops or None,
                        index=index,
                    )
                )
                index += 1
            elif isinstance(event, Step):
                final.append(event)
                index = 0
            elif event.id in shown:
                if isinstance(event, Alloc):
                    block = self.blocks[event.id]
                    event = replace(event, tag=block.tag, family=block.family)
                final.append(event)
        return final

    def step_ends(self) -> list[int]:
        """Return the index of the event that ends each step."""
        return [i for i, event in enumerate(self.events) if isinstance(event, Step)]

    def span(self, step: int = -1) -> tuple[int, int]:
        """Return the range of a step's events, without its end; by default the last step's."""
        ends = [-1, *self.step_ends()]
        which = range(1, len(ends))[step]
        return ends[which - 1] + 1, ends[which]

    def last_step(self) -> list[tuple[Op, OpCost]]:
        """Return the ops of the last step and their costs, in order."""
        begin, end = self.span()
        ops = enumerate(self.events[begin:end], begin)
        return [(event, self.costs[at]) for at, event in ops if isinstance(event, Op)]

    def lifetimes(self) -> dict[BlockId, tuple[int, int]]:
        """Return the range of events in which each block is alive, from its allocation on."""
        found: dict[BlockId, tuple[int, int]] = {}
        for index, event in enumerate(self.events):
            if isinstance(event, Alloc):
                found[event.id] = (index, len(self.events))
            elif isinstance(event, Free) and event.id in found:
                found[event.id] = (found[event.id][0], index)
        return found

    def touches_memory(self, op: Op) -> bool:
        """Return whether the op accesses a byte of the device; a step has no other ops."""
        blocks = (self.blocks[i] for i in op.reads + op.writes)
        return any(block.bytes and not block.on_host for block in blocks)
