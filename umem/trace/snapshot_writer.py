"""Export of a trace as a memory snapshot of torch, for https://pytorch.org/memory_viz.

A trace has no addresses, so blocks get some: a block lies where an earlier one of its size lay that
is free now, or else at a new place. Each place is a segment of the snapshot.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.units import PAGE_BYTES
from .schema import Alloc, Event, Free, Header, Op
from .step_part import device_bytes

_FIRST = 1 << 40  # address of the first place
_PROTOCOL = 4  # what torch.cuda.memory._dump_snapshot writes


@dataclass(slots=True)
class _Place:
    address: int
    size: int
    block: Alloc | None = None  # None: free
    frames: list[dict[str, Any]] = field(default_factory=list)


class _Device:
    def __init__(self, number: int) -> None:
        self.number = number
        self.history: list[dict[str, Any]] = []
        self._places: list[_Place] = []
        self._free: dict[int, list[_Place]] = {}  # by size
        self._of: dict[int, _Place] = {}  # by block
        self._end = _FIRST

    def alloc(self, alloc: Alloc, us: int) -> dict[str, Any]:
        size = device_bytes(max(alloc.bytes, 1))
        free = self._free.get(size)
        place = free.pop() if free else self._new(size, us)
        place.block = alloc
        self._of[alloc.id] = place
        entry = self._entry("alloc", place, us)
        place.frames = entry["frames"]
        return entry

    def free(self, block: int, us: int) -> None:
        place = self._of.pop(block)
        self._entry("free_requested", place, us)
        self._entry("free_completed", place, us)
        place.block = None
        self._free.setdefault(place.size, []).append(place)

    def segments(self) -> list[dict[str, Any]]:
        return [self._segment(place) for place in self._places]

    def _new(self, size: int, us: int) -> _Place:
        place = _Place(self._end, size)
        self._end += -(-size // PAGE_BYTES) * PAGE_BYTES
        self._places.append(place)
        self._entry("segment_alloc", place, us)
        return place

    def _entry(self, action: str, place: _Place, us: int) -> dict[str, Any]:
        entry = {
            "action": action, "addr": place.address, "size": _size(place), "stream": 0,
            "time_us": us, "frames": [] if action == "alloc" else place.frames,
        }  # fmt: skip
        self.history.append(entry)
        return entry

    def _segment(self, place: _Place) -> dict[str, Any]:
        used = 0 if place.block is None else place.size
        block = {
            "address": place.address, "size": place.size, "requested_size": _size(place),
            "state": "active_allocated" if used else "inactive", "frames": place.frames,
        }  # fmt: skip
        return {
            "device": self.number, "address": place.address, "total_size": place.size, "stream": 0,
            "segment_type": "small" if place.size < PAGE_BYTES else "large",
            "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
            "allocated_size": used, "active_size": used, "requested_size": used and _size(place),
            "blocks": [block],
        }  # fmt: skip


def _size(place: _Place) -> int:
    return place.size if place.block is None else place.block.bytes


def write(path: Path, header: Header, events: Iterable[Event]) -> None:
    """Write a pickle as `torch.cuda.memory._dump_snapshot` does; it is made in memory as a whole.

    Frames name the operator that a block was allocated in, and its tag and family. Times are those
    of the operators; one without a time counts as 1 µs.
    """
    devices: dict[int, _Device] = {}
    where: dict[int, _Device] = {}  # by block
    waiting: list[tuple[Alloc, dict[str, Any]]] = []  # allocated in the operator that has not ended
    now = 0.0
    for event in events:
        if type(event) is Alloc:
            device = devices.setdefault(event.device, _Device(event.device))
            where[event.id] = device
            waiting.append((event, device.alloc(event, round(now))))
        elif type(event) is Free:
            where.pop(event.id).free(event.id, round(now))
        elif type(event) is Op:
            _name(waiting, event.name)
            now += 1.0 if event.us is None else event.us
    _name(waiting, "after the last operator")
    count = max(devices, default=0) + 1
    content = {
        "segments": [s for _, device in sorted(devices.items()) for s in device.segments()],
        "device_traces": [devices[n].history if n in devices else [] for n in range(count)],
        "external_annotations": [],
        "allocator_settings": {"source": f"umem trace of {header.device}: {header.source}"},
    }
    path.write_bytes(pickle.dumps(content, _PROTOCOL))


def _name(waiting: list[tuple[Alloc, dict[str, Any]]], op: str) -> None:
    """Say in which operator the blocks were allocated: its event comes after theirs."""
    for alloc, entry in waiting:
        about = " ".join(word for word in (alloc.tag, alloc.family) if word)
        entry["frames"].append({"filename": about or "umem", "line": 0, "name": op})
    waiting.clear()
