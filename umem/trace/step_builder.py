"""Builds the columns of one step from the events of a trace."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np

from ..errors import TraceError
from .event_columns import EventColumns, EventRows
from .ids import BlockId
from .reader import read
from .schema import Alloc, Event, Op, Step
from .step_columns import StepColumns
from .step_part import Part
from .step_trace import StepTrace


def last_step(events: Iterable[Event]) -> StepTrace:
    """Return the last complete step of a trace's events.

    Raises:
        TraceError: the events are not a valid trace, the step has no op that accesses memory, or
            ops use blocks of several devices.
    """
    builder, device, used = StepBuilder(), dict[BlockId, int](), set[int]()
    for event in events:
        if isinstance(event, Alloc):
            device[event.id] = event.device
        elif isinstance(event, Op):
            used.update(device.get(block, 0) for block in (*event.reads, *event.writes))
        builder.add(event)
    if len(used) > 1:
        raise TraceError(
            f"a trace of devices {', '.join(map(str, sorted(used)))}; allowed: one device's "
            "(umem.simulation.replay.load_devices splits them)"
        )
    return builder.step()


def read_step(path: str | os.PathLike[str]) -> StepTrace:
    """Return the last complete step of a trace file.

    Raises:
        TraceError: as `last_step`, and the file is not a valid trace.
    """
    try:
        return last_step(read(path)[1])
    except TraceError as error:
        text = str(error)  # of a line, it has the file's name
        raise TraceError(text if text.startswith(f"{path}:") else f"{path}: {text}") from None


class StepBuilder:
    """Takes a trace's events in order, keeps the last two steps and the live blocks.

    A step ends at its `Step`. Parts without ops are not steps: a recording that starts midway
    lists the live blocks in such a part, before its first step. A trace without any `Step` has one
    step, which is the whole trace.
    """

    def __init__(self) -> None:
        none = np.zeros(0, np.int64)
        self._now = Part(0, EventRows().columns(), 0, none, none, after_ops=False)
        self._rows = EventRows()  # added one by one, after those in `_now`
        self._done: deque[Part] = deque(maxlen=2)
        self._steps = 0
        self._peak_bytes = self._bytes = 0  # on the device, before `_now`

    @property
    def steps(self) -> int:
        """Number of complete steps; 1 for a trace that does not mark any."""
        return self._steps or int(self._present().has_ops and not self._now.number)

    @property
    def peak_bytes(self) -> int:
        """Peak of the whole trace, in bytes on the device."""
        return max(self._peak_bytes, self._present().peak(self._bytes)[0])

    def add(self, event: Event) -> None:
        """Take the next event.

        Raises:
            TraceError: a step ends in which a block is allocated twice, or freed and not live.
        """
        if isinstance(event, Step):
            self._present()
            self._end()
        else:
            self._rows.add(event)

    def take(self, events: EventColumns) -> None:
        """Take the next events.

        Raises:
            TraceError: a step ends in which a block is allocated twice, or freed and not live.
        """
        self._present()
        for part, ends in events.steps():
            self._now = replace(self._now, events=self._now.events.then(part))
            if ends:
                self._end()

    def begin(self) -> None:
        """Start with the next event; blocks that are live now are not part of the first step."""
        part = self._present()
        peak, self._bytes = part.peak(self._bytes)
        self._peak_bytes = max(self._peak_bytes, peak)
        self._now = part.following()

    def step(self, index: int = -1, cut: Iterable[int] = ()) -> StepTrace:
        """Return the last complete step in steady state; -2 is the one before.

        A block of which an op of the step uses at most half is cut into smaller pieces than others,
        and so is each of its size: `core.finer_piece`.

        Args:
            cut: sizes of ranges whose blocks are cut in any case.

        Raises:
            TraceError: there is no such step, it has no op that accesses memory, or an op uses a
                block that is not live.
        """
        return StepColumns(self._part(index), set(cut)).build()

    def events(self, index: int = -1) -> Iterator[Event]:
        """Yield a trace of that step alone; its `step` differs in a few next-step aliases at most.

        It has only events that were read, not those that a `DeviceSplit` made.

        Raises:
            TraceError: there is no such step.
        """
        part = self._part(index)
        live, own = part.events.source[: part.live], part.events.source[part.live :]
        first = [Step()] if part.number else []
        return (event for event in chain(live, first, own, [Step()]) if event is not None)

    def _present(self) -> Part:
        """Return the part that has not ended, with all its events."""
        if self._rows:
            events = self._now.events.then(self._rows.columns())
            self._now, self._rows = replace(self._now, events=events), EventRows()
        return self._now

    def _part(self, index: int) -> Part:
        parts = [*self._done]
        if not parts:
            if self._now.number:
                raise TraceError("no step with an op has ended: the last event of one is `step`")
            parts = [self._present()]
        if not -len(parts) <= index < 0:
            raise TraceError(f"step {index} is not kept; kept: -{len(parts)} to -1")
        return parts[index]

    def _end(self) -> None:
        part = self._now
        if len(part.events) == part.live:
            return  # a second end of the same step
        peak, self._bytes = part.peak(self._bytes)
        self._peak_bytes = max(self._peak_bytes, peak)
        if part.has_ops:
            self._done.append(part)
            self._steps += 1
        self._now = part.following()
