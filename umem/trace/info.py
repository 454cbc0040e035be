"""Summary of a trace, computed in one pass with memory linear in the live blocks."""

from __future__ import annotations

import heapq
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..base.units import PAGE_BYTES
from .reader import read
from .schema import Alloc, Event, Free, Header, Op, Step

LARGEST = 10  # number of listed blocks


class LiveBytes:
    """The bytes of the live blocks by tag, and their peak."""

    def __init__(self) -> None:
        self.live: dict[int, Alloc] = {}
        self.by_tag: dict[str, int] = {}
        self.total = 0
        self.peak = 0
        self._at_peak: dict[str, int] | None = {}  # None: by_tag is the peak so far

    def alloc(self, alloc: Alloc) -> bool:
        """Count an allocation; return whether this is a new peak."""
        self.live[alloc.id] = alloc
        self._add(alloc.tag, alloc.bytes)
        self.total += alloc.bytes
        if self.total <= self.peak:
            return False
        self.peak = self.total
        self._at_peak = None
        return True

    def free(self, block: int) -> None:
        """Count the free of a live block."""
        if self._at_peak is None:
            self._at_peak = dict(self.by_tag)  # copied once per descent, not once per allocation
        alloc = self.live.pop(block)
        self.total -= alloc.bytes
        self._add(alloc.tag, -alloc.bytes)

    def restart_peak(self) -> None:
        """Start a new peak from the current state."""
        self.peak = self.total
        self._at_peak = None

    def _add(self, tag: str, change: int) -> None:
        count = self.by_tag.pop(tag, 0) + change
        if count:  # a tag is listed as long as it has bytes
            self.by_tag[tag] = count

    @property
    def peak_by_tag(self) -> Mapping[str, int]:
        """Bytes by tag at the peak."""
        return self.by_tag if self._at_peak is None else self._at_peak


@dataclass
class Info:
    """Figures of a trace. Bytes are as requested, times in µs."""

    device: str
    source: str
    note: str
    events: int = 0
    steps: int = 0
    ops: int = 0
    allocs: int = 0
    frees: int = 0
    ops_without_time: int = 0
    small_tensors: int = 0  # below a page of 2 MiB
    small_bytes: int = 0  # all allocated bytes of small tensors
    allocated_bytes: int = 0
    live_bytes_at_end: int = 0
    peak_bytes: int = 0
    peak_op: int | None = None  # its index in the file, from 0; None: after the last op
    peak_op_name: str = ""
    peak_by_tag: dict[str, int] = field(default_factory=dict)
    compute_us: float = 0.0
    step_compute_us: float | None = None  # of the last complete step; None without steps
    largest: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return asdict(self)


def examine(path: str | os.PathLike[str]) -> Info:
    """Return the figures of the trace at `path`.

    Raises:
        TraceError: the file is not a valid trace.
    """
    header, events = read(path)
    counter = _Counter(header)
    for event in events:
        counter.add(event)
    return counter.finish()


class _Counter:
    def __init__(self, header: Header) -> None:
        self._info = Info(header.device, header.source, header.note)
        self._memory = LiveBytes()
        self._peak_ahead = False  # the peak is inside the op that has not ended yet
        self._step_us = 0.0
        self._step_ops = 0
        self._largest: list[tuple[int, int, Alloc]] = []  # a heap, the smallest first

    def add(self, event: Event) -> None:
        info = self._info
        info.events += 1
        if type(event) is Op:
            self._op(event)
        elif type(event) is Alloc:
            self._alloc(event)
        elif type(event) is Free:
            info.frees += 1
            self._memory.free(event.id)
        elif type(event) is Step and self._step_ops:  # a step without ops does not count
            info.steps += 1
            info.step_compute_us = self._step_us
            self._step_us = 0.0
            self._step_ops = 0

    def finish(self) -> Info:
        info = self._info
        info.peak_bytes = self._memory.peak
        info.live_bytes_at_end = self._memory.total
        by_size = sorted(self._memory.peak_by_tag.items(), key=lambda item: -item[1])
        info.peak_by_tag = dict(by_size)
        info.largest = [
            {"id": a.id, "bytes": a.bytes, "tag": a.tag, "family": a.family}
            for _, _, a in sorted(self._largest, reverse=True)
        ]
        return info

    def _op(self, op: Op) -> None:
        info = self._info
        if self._peak_ahead:
            info.peak_op, info.peak_op_name = info.ops, op.name
            self._peak_ahead = False
        info.ops += 1
        self._step_ops += 1
        if op.us is None:
            info.ops_without_time += 1
        else:
            info.compute_us += op.us
            self._step_us += op.us

    def _alloc(self, alloc: Alloc) -> None:
        info = self._info
        info.allocs += 1
        info.allocated_bytes += alloc.bytes
        if alloc.bytes < PAGE_BYTES:
            info.small_tensors += 1
            info.small_bytes += alloc.bytes
        if self._memory.alloc(alloc):
            self._peak_ahead = True
            info.peak_op, info.peak_op_name = None, ""
        entry = (alloc.bytes, -info.allocs, alloc)  # of equal sizes the first
        if len(self._largest) < LARGEST:
            heapq.heappush(self._largest, entry)
        else:
            heapq.heappushpop(self._largest, entry)
