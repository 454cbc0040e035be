"""The recorded steps of each device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.native import core
from ..trace.ids import Address, BlockId

if TYPE_CHECKING:
    from ..trace.device_split import DeviceSplit
    from ..trace.step_builder import StepBuilder

_NO_BLOCK = BlockId((1 << 62) - 1)  # an id that no block has


class StepRecording:
    """Steps as native code records them, while that is on; it begins and ends between steps."""

    def __init__(self) -> None:
        self.addresses: dict[BlockId, Address] = {}  # of the blocks of the last step
        self._builders: dict[int, StepBuilder] = {}  # by device
        self._split: DeviceSplit | None = None  # while it is on
        self._freed: list[BlockId] = []  # in the last step, whose addresses are not needed any more

    @property
    def on(self) -> bool:
        """Whether steps are recorded."""
        return self._split is not None

    @property
    def used(self) -> frozenset[int]:
        """The devices that had ops in the last recorded step."""
        return self._split.used if self._split is not None else frozenset()

    def builder(self, device: int) -> StepBuilder:
        """Return what has the recorded steps of a device."""
        if device not in self._builders:
            from ..trace.step_builder import StepBuilder

            self._builders[device] = StepBuilder()
        return self._builders[device]

    def start(self) -> None:
        """Record the steps from now on."""
        from ..trace.device_split import DeviceSplit

        core.record_start("plan")
        self._split = DeviceSplit()

    def stop(self) -> None:
        """Record no more, and forget the steps."""
        core.record_stop("plan")
        self._split = None
        self._builders.clear()
        self.addresses.clear()
        self._freed.clear()

    def take(self) -> bool:
        """Take the step that just ended; return False if it has more events than are kept."""
        from ..trace import native_columns
        from ..trace.device_split import EVERY
        from ..trace.schema import Free

        assert self._split is not None
        recorded: core.Recorded = core.record_take("plan")
        if recorded["dropped"]:
            return False
        for block in self._freed:
            self.addresses.pop(block, None)
        self._freed.clear()
        self.addresses.update(native_columns.addresses(recorded))
        for i, event in enumerate(native_columns.events(recorded)):
            if i == recorded["before"] > 0:
                self._begin()
            for device, own in self._split.take(event):
                builders = self._builders.values() if device == EVERY else (self.builder(device),)
                for builder in builders:
                    builder.add(own)
            if type(event) is Free:
                self._freed.append(event.id)
        return True

    def _begin(self) -> None:
        """Start the recording; blocks alive before it are no part of the first step."""
        from ..trace.schema import Alloc, Free, Step

        for builder in self._builders.values():
            for event in (Step(), Alloc(_NO_BLOCK, 1), Free(_NO_BLOCK), Step()):
                builder.add(event)
