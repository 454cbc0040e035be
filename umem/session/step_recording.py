"""The recorded steps of each device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.native import core

if TYPE_CHECKING:
    from ..trace.device_split import DeviceSplit
    from ..trace.event_columns import EventColumns
    from ..trace.step_builder import StepBuilder
    from ..trace.step_trace import Ints


class StepRecording:
    """Steps as native code records them, while that is on; it begins and ends between steps."""

    def __init__(self) -> None:
        self._builders: dict[int, StepBuilder] = {}  # by device
        self._split: DeviceSplit | None = None  # while it is on
        self._addresses: dict[int, int] = {}  # by the id of each block of the last step
        self._freed: list[int] = []  # in the last step, whose addresses are not needed any more

    @property
    def on(self) -> bool:
        """True if steps are recorded."""
        return self._split is not None

    @property
    def used(self) -> frozenset[int]:
        """The devices that had ops in the last recorded step."""
        return self._split.used if self._split is not None else frozenset()

    def builder(self, device: int) -> StepBuilder:
        """Return the builder of a device's recorded steps."""
        if device not in self._builders:
            from ..trace.step_builder import StepBuilder

            self._builders[device] = StepBuilder()
        return self._builders[device]

    def addresses(self, blocks: Ints) -> Ints:
        """Return the address of each block; 0 if it is not in the last step."""
        import numpy as np

        return np.array([self._addresses.get(block, 0) for block in blocks.tolist()], np.int64)

    def start(self) -> None:
        """Start recording."""
        from ..trace.device_split import DeviceSplit

        core.record_start("plan")
        self._split = DeviceSplit()

    def stop(self) -> None:
        """Stop recording, and forget the steps."""
        core.record_stop("plan")
        self._split = None
        self._builders.clear()
        self._addresses.clear()
        self._freed.clear()

    def take(self) -> bool:
        """Take the step that just ended; return False if it has more events than are kept."""
        from ..trace.event_columns import ALLOC, FREE, EventColumns

        recorded: core.Recorded = core.record_take("plan")
        if recorded["dropped"]:
            return False
        for block in self._freed:
            self._addresses.pop(block, None)
        kind, ids = recorded["kind"], recorded["id"]
        made = kind == ALLOC
        addresses = recorded["address"][made].tolist()
        self._addresses.update(zip(ids[made].tolist(), addresses, strict=True))
        self._freed = ids[kind == FREE].tolist()
        events, before = EventColumns.of_native(recorded), recorded["before"]
        if before:  # blocks alive before the recording are no part of the first step
            self._add(events.slice(0, before))
            for builder in self._builders.values():
                builder.begin()
        self._add(events.slice(before, len(events)))
        return True

    def _add(self, events: EventColumns) -> None:
        assert self._split is not None
        for device, own in self._split.take(events).items():
            self.builder(device).take(own)
