"""The budget `auto`, which follows the free memory of a device shared with other processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..base.native import core
from ..base.units import PAGE_BYTES, format_bytes
from ..errors import UmemError

_log = logging.getLogger("umem")

EVERY_S = 0.1  # the minimum time between queries of the driver
TRIM_EVERY_S = 5.0  # the minimum time between trims, which wait for the device
PATIENCE = 5  # consecutive checks that must see more free memory before the budget grows


class Band:
    """The hysteresis band of one device's budget.

    The possible budget is umem's memory plus free memory, less a headroom, and at most the share of
    the device that the process may use. The budget shrinks when the possible budget, plus the
    memory that the driver keeps for umem without contents, is lower by half the headroom. Memory
    without contents is discarded memory, and on a GPU also evicted memory. The driver counts both
    as used: without them, umem's own evictions would look like another process. The budget grows
    after `PATIENCE` consecutive checks with a possible budget that is higher by the headroom (and
    by at least an eighth of the budget). So umem releases memory quickly and does not oscillate.
    Memory without contents never counts towards growth, because the driver may have given it to
    other processes.

    Args:
        headroom: bytes to leave free.
    """

    def __init__(self, headroom: int) -> None:
        self.headroom = headroom
        self._more = 0  # consecutive checks that saw more

    def budget(self, memory: core.DeviceMemory) -> int | None:
        """Return the new budget in bytes, in whole pages; None to keep the present one."""
        now = memory["budget_bytes"]
        free = memory["held_bytes"] + memory["free_bytes"] - self.headroom
        possible = _pages(min(free, memory["allowed_bytes"]))
        least = _pages(possible + memory["dropped_bytes"] + memory["unused_bytes"])
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


class AutoBudget:
    """The budgets of all devices, kept in their bands; a budget that the program set stays.

    Args:
        least: the minimum budget in bytes.
        headroom: returns the bytes to leave free on a device with the given total bytes.
    """

    def __init__(self, least: int, headroom: Callable[[int], int]) -> None:
        self._least, self._headroom = least, headroom
        self._bands: dict[int, Band] = {}
        self._known: dict[int, int] = {}  # budgets by device, as found or set here
        self._looked = self._trimmed = 0.0

    def step_ended(self) -> bool:
        """Run `look` at most every `EVERY_S` seconds; return whether a budget changed."""
        now = time.monotonic()
        if now - self._looked < EVERY_S:
            return False
        self._looked = now
        return self.look()

    def look(self) -> bool:
        """Check the free memory now; return whether a budget changed."""
        try:
            changed = [self._follow(memory) for memory in self._memory()]
        except UmemError as error:  # from the driver; the budgets stay unchanged
            _log.info("cannot query the free memory, so budgets stay unchanged: %s", error)
            return False
        return any(changed)

    def _memory(self) -> list[core.DeviceMemory]:
        """Return the memory of all devices; if it is short, trim discarded memory first."""
        found = core.device_memory()
        now = time.monotonic()
        if now - self._trimmed >= TRIM_EVERY_S and any(map(self._in_doubt, found)):
            self._trimmed = now
            core.trim()
            return core.device_memory()
        return found

    def _band(self, memory: core.DeviceMemory) -> Band:
        """Return the device's band; another thread may open a device at any time."""
        device = memory["device"]
        if device not in self._bands:
            self._bands[device] = Band(self._headroom(memory["total_bytes"]))
        return self._bands[device]

    def _in_doubt(self, memory: core.DeviceMemory) -> bool:
        headroom = self._band(memory).headroom
        return memory["dropped_bytes"] > 0 and memory["free_bytes"] < headroom // 2

    def _follow(self, memory: core.DeviceMemory) -> bool:
        device, now = memory["device"], memory["budget_bytes"]
        requested = memory["requested_bytes"]  # by the program, unless it was set here
        if requested not in (0, self._known.get(device)):
            return False
        if self._known.setdefault(device, now) != now:
            return False
        wanted = self._band(memory).budget(memory)
        if wanted is None or (wanted := max(wanted, self._least)) == now:
            return False
        try:
            core.set_device_budget(device, wanted)
        except UmemError as error:  # a running op needs the memory; the next check retries
            _log.info("the budget stays at %s: %s", format_bytes(now), error)
            return False
        self._known[device] = wanted
        _log.info("device %d: budget changed to %s, from free memory", device, format_bytes(wanted))
        return True


def no_headroom(_total: int) -> int:
    """Return 0: no other process uses a software device."""
    return 0
