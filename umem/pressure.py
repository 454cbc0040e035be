"""A budget of `auto` follows the device's free memory, which other processes change too."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .errors import UmemError
from .native import core
from .units import MIB, format_bytes
from .values import PAGE_BYTES

if TYPE_CHECKING:
    from ._core import DeviceMemory

_log = logging.getLogger("umem")

EVERY_S = 0.1  # the driver is asked no more often
TRIM_EVERY_S = 5.0  # and gets discarded memory back by a call that waits for the device
PATIENCE = 5  # looks in a row that have to see more room before the budget grows
_MOST_HEADROOM = 512 * MIB  # as for the first budget: for contexts, kernels, other libraries


class Band:
    """The rule for one device: what budget to change to, with hysteresis.

    The budget could be what umem holds, and what is free beyond a headroom. It falls as soon as
    that, with what umem discarded, is less by half the headroom; it grows when that is more by a
    whole one (and an eighth of the budget) for some looks: so umem gives way fast, and does not
    swing. What was discarded counts for staying only: the driver may have given it to others.

    Args:
        headroom: bytes to leave free.
    """

    def __init__(self, headroom: int) -> None:
        self.headroom = headroom
        self._more = 0  # looks in a row

    def budget(self, memory: DeviceMemory) -> int | None:
        """The new budget in bytes, whole pages; None: it stays."""
        now = memory["budget_bytes"]
        possible = _pages(memory["held_bytes"] + memory["free_bytes"] - self.headroom)
        least = _pages(possible + memory["dropped_bytes"])
        if least < now - max(self.headroom // 2, PAGE_BYTES):
            self._more = 0
            return least
        grown = possible > now + max(self.headroom, now // 8, 2 * PAGE_BYTES)
        self._more = self._more + 1 if grown else 0
        if self._more < PATIENCE:
            return None
        self._more = 0
        return possible


def _pages(count: int) -> int:
    return max(0, count) // PAGE_BYTES * PAGE_BYTES


class Follower:
    """Keeps the budgets of all devices in their bands. A budget that somebody else set, stays.

    Args:
        least: bytes, below which no budget goes.
        headroom: for a device of so many bytes.
    """

    def __init__(self, least: int, headroom: Callable[[int], int]) -> None:
        self._least, self._headroom = least, headroom
        self._bands: dict[int, Band] = {}
        self._known: dict[int, int] = {}  # budgets by device, as found or set here
        self._looked = self._trimmed = 0.0

    def step_ended(self) -> bool:
        """Whether a budget changed: a look, if the last one is long enough ago."""
        now = time.monotonic()
        if now - self._looked < EVERY_S:
            return False
        self._looked = now
        return self.look()

    def look(self) -> bool:
        """Whether a budget changed."""
        try:
            changed = [self._follow(memory) for memory in self._memory()]
        except UmemError as error:  # of the driver: the budgets stay as they are
            _log.info("the free memory is not known: %s", error)
            return False
        return any(changed)

    def _memory(self) -> list[DeviceMemory]:
        """Of all devices. Where memory is short, what was discarded is really given back first."""
        found = core.device_memory()
        for memory in found:
            if memory["device"] not in self._bands:
                self._bands[memory["device"]] = Band(self._headroom(memory["total_bytes"]))
        now = time.monotonic()
        if now - self._trimmed >= TRIM_EVERY_S and any(map(self._in_doubt, found)):
            self._trimmed = now
            core.trim()
            return core.device_memory()
        return found

    def _in_doubt(self, memory: DeviceMemory) -> bool:
        headroom = self._bands[memory["device"]].headroom
        return memory["dropped_bytes"] > 0 and memory["free_bytes"] < headroom // 2

    def _follow(self, memory: DeviceMemory) -> bool:
        device, now = memory["device"], memory["budget_bytes"]
        if self._known.setdefault(device, now) != now:
            return False
        wanted = self._bands[device].budget(memory)
        if wanted is None or (wanted := max(wanted, self._least)) == now:
            return False
        try:
            core.set_device_budget(device, wanted)
        except UmemError as error:  # an op holds what would have to leave: at the next look
            _log.info("the budget stays at %s: %s", format_bytes(now), error)
            return False
        self._known[device] = wanted
        _log.info("device %d: the budget is %s, by the free memory", device, format_bytes(wanted))
        return True


def cuda_headroom(total: int) -> int:
    """Bytes that umem leaves free on a GPU of so many bytes."""
    return min(_MOST_HEADROOM, total // 8)


def no_headroom(_total: int) -> int:
    """Of a software device nobody else needs a part."""
    return 0
