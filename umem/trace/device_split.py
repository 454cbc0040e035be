"""Splits the events of a program on several devices into one log for each device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from .event_columns import ALLOC, FREE, OP, EventColumns, EventRows
from .ids import BlockId
from .step_trace import Ints


class DeviceSplit:
    """Takes the events of all devices in order, and returns those of each.

    A device gets its blocks, the ops that use some of them, and the end of each step. Devices work
    side by side: an op takes time on the devices whose blocks it uses. An op that uses blocks of
    several devices begins when the last of them is ready, and a step ends for all devices when the
    last one has ended it. The time that a device waits is an op without a name and without blocks.
    """

    def __init__(self) -> None:
        self._alone = True  # so far all blocks were of device 0, which needs no table
        self._device: dict[int, int] = {}  # by live block; 0 if it is not listed
        self._us: dict[int, float] = {}  # since the step's begin; of devices that had ops in it
        self._last: list[int] = [0]  # devices of the last op
        self._known = {0}  # devices that have had events
        self._rows: dict[int, EventRows] = {}  # of each device, while events are taken
        self.used: frozenset[int] = frozenset()  # devices that had ops in the last complete step

    def take(self, events: EventColumns) -> dict[int, EventColumns]:
        """Return the events for each device that come from these."""
        if self._alone and not events.device.any():
            for part, ends in events.steps():
                self._pass(part, ends=ends)
            return {0: events}
        self._alone = False
        self._rows = {device: EventRows() for device in self._known}
        self._split(events.with_times())  # a device would wait for an unknown time in another
        return {device: rows.columns() for device, rows in self._rows.items()}

    def _pass(self, part: EventColumns, *, ends: bool) -> None:
        """Count the time of events that are all of device 0."""
        us = np.maximum(part.us[part.kind == OP], 0.0)
        if len(us):
            self._us[0] = float(np.cumsum(np.append(self._us.get(0, 0.0), us))[-1])
        if ends:
            self._end()

    def _split(self, events: EventColumns) -> None:
        accesses, starts = events.accesses.tolist(), events.access_start.tolist()
        part_starts = np.searchsorted(events.part_access, events.access_start).tolist()
        ranges = np.stack((events.part_access, events.begin, events.end), axis=1)
        columns = (events.kind, events.id, events.bytes, events.device, events.us, events.reads)
        lists = (events.name, events.family, events.source or repeat(None))
        rows = zip(*(column.tolist() for column in columns), *lists, strict=False)
        for i, (kind, block, size, device, us, reads, name, family, source) in enumerate(rows):
            if kind == OP:
                start, end = starts[i], starts[i + 1]
                parts = ranges[part_starts[i] : part_starts[i + 1]] - (start, 0, 0)
                used = accesses[start:end]
                self._op(name, used[:reads], used[reads:], us, family=family, parts=parts)
            elif kind == ALLOC:
                self._device[block] = device
                self._of(device).plain(
                    kind, block, size=size, device=device, name=name, family=family, source=source
                )
            elif kind == FREE:
                self._of(self._device.pop(block, 0)).plain(kind, block, source=source)
            else:
                self._step(kind)

    def _of(self, device: int) -> EventRows:
        self._known.add(device)
        return self._rows.setdefault(device, EventRows())

    def _op(
        self,
        name: str,
        reads: Sequence[BlockId],
        writes: Sequence[BlockId],
        us: float,
        *,
        family: str,
        parts: Ints,
    ) -> None:
        places = [self._device.get(block, 0) for block in (*reads, *writes)]
        if places:
            self._last = sorted(set(places))
        begin = max(self._us.get(device, 0.0) for device in self._last)
        for device in self._last:
            self._wait(device, begin)
            self._us[device] = begin + max(us, 0.0)
            own = [place == device for place in places]
            new = {old: new for new, old in enumerate(i for i, here in enumerate(own) if here)}
            self._of(device).op(
                name,
                [block for block, here in zip(reads, own, strict=False) if here],
                [block for block, here in zip(writes, own[len(reads) :], strict=True) if here],
                None if us < 0 else us,
                family=family,
                parts=[n for i, *part in parts.tolist() if i in new for n in (new[i], *part)],
            )

    def _wait(self, device: int, until: float) -> None:
        us = until - self._us.get(device, 0.0)
        if us > 0:
            self._of(device).op("", (), (), us)

    def _step(self, kind: int) -> None:
        end = max(self._us.values(), default=0.0)
        for device in self._us:
            self._wait(device, end)
        for device in self._known:
            self._of(device).plain(kind)
        self._end()

    def _end(self) -> None:
        self.used = frozenset(self._us)
        self._us.clear()
