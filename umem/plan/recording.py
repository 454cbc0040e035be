"""What a program on fake tensors did, before any device is chosen: blocks, ops and their costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from ..trace import schema


@dataclass
class Block:
    """A storage's life. What it is for may turn out later than its allocation."""

    id: int
    bytes: int
    tag: str
    family: str
    module: str  # that was running when it was made
    on_host: bool = False  # of a program that says itself what goes to the device


@dataclass(frozen=True, slots=True)
class Work:
    """One op and what it costs on any device."""

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    family: str
    module: str
    phase: str  # forward, backward, optimizer
    flops: float
    bytes: int  # that it moves between the device's memory and its cores
    precision: str  # of its products: half, tf32, fp32, fp64
    ordinal: int = -1  # of an op of the forward pass: its index into Recording.forward


@dataclass(frozen=True, slots=True)
class Born:
    """A block begins to live."""

    block: int


@dataclass(frozen=True, slots=True)
class Died:
    """A block's life ends."""

    block: int


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A step of the program ends."""


Note: TypeAlias = "Work | Born | Died | StepEnd"
# The microseconds that an op takes.
Clock: TypeAlias = Callable[[Work], float]


@dataclass
class Recording:
    """The steps of a program, in its order.

    Blocks that are alive when the first step begins come first, without the ops that made them:
    setting up is no part of a step.
    """

    notes: list[Note] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)  # where the plan may differ from a run
    steps: int = 0
    # All calls of the last step's forward pass by their overloads' names, views and asides too.
    forward: tuple[str, ...] = ()

    def events(self, clock: Clock | None = None) -> list[schema.Event]:
        """The events of a trace, with the durations by `clock` (none: ops have no time)."""
        shown = {i for i, block in self.blocks.items() if not block.on_host}
        events: list[schema.Event] = []
        index = 0
        for note in self.notes:
            if isinstance(note, Work):
                if shown.isdisjoint(note.reads + note.writes):
                    continue  # on the host
                events.append(self._op(note, index, shown, clock))
                index += 1
            elif isinstance(note, StepEnd):
                events.append(schema.Step())
                index = 0
            elif note.block not in shown:
                continue
            elif isinstance(note, Born):
                block = self.blocks[note.block]
                events.append(schema.Alloc(block.id, block.bytes, block.tag, block.family))
            else:
                events.append(schema.Free(note.block))
        return events

    def step_ends(self) -> list[int]:
        """The index of the note that ends each step."""
        return [i for i, note in enumerate(self.notes) if isinstance(note, StepEnd)]

    def span(self, step: int = -1) -> tuple[int, int]:
        """The notes of a step, without its end: from, up to. Not given: of the last one."""
        ends = [-1, *self.step_ends()]
        which = range(1, len(ends))[step]
        return ends[which - 1] + 1, ends[which]

    def last_step(self) -> list[Work]:
        """The ops of the last step, in order."""
        begin, end = self.span()
        return [note for note in self.notes[begin:end] if isinstance(note, Work)]

    def lives(self) -> dict[int, tuple[int, int]]:
        """From which note up to which each block is alive."""
        found: dict[int, tuple[int, int]] = {}
        for index, note in enumerate(self.notes):
            if isinstance(note, Born):
                found[note.block] = (index, len(self.notes))
            elif isinstance(note, Died) and note.block in found:
                found[note.block] = (found[note.block][0], index)
        return found

    def touches_memory(self, work: Work) -> bool:
        """Whether the op accesses a byte of the device; a step has no other ops."""
        blocks = (self.blocks[i] for i in work.reads + work.writes)
        return any(block.bytes and not block.on_host for block in blocks)

    @staticmethod
    def _op(work: Work, index: int, shown: set[int], clock: Clock | None) -> schema.Op:
        return schema.Op(
            work.name,
            tuple(i for i in work.reads if i in shown),
            tuple(i for i in work.writes if i in shown),
            us=None if clock is None else clock(work),
            flops=work.flops or None,
            index=index,
            family=work.family,
        )
