"""The cost of steps: bytes that move, and time."""

from __future__ import annotations

import time
from typing import NamedTuple

from ..base.native import core

MORE = 1.02  # ratio of bytes
SLOWER = 1.1  # ratio of times, above the usual variation between steps


class Cost(NamedTuple):
    """The cost of one step."""

    bytes: int  # moved, both ways
    us: float  # see `Meter`

    def worse_than(self, other: Cost) -> bool:
        """Return whether both figures are clearly worse: a step that moves more may hide more."""
        return self.bytes > MORE * other.bytes and self.us > SLOWER * other.us


class Meter:
    """A meter for the cost of steps, from `start` to `read`.

    Time is host time, so call both while the device is idle. On the software device without a
    disk it is the virtual time that compute waited, because its compute takes no time.

    Args:
        device: the number of the device whose moved bytes count; None: those of all.
    """

    def __init__(self, device: int | None = None) -> None:
        self._device = device
        self._begin = Cost(0, 0)
        self._virtual = False

    def start(self) -> None:
        """Start measuring a step."""
        options = core.current_options()
        self._virtual = options.device == "soft" and not options.disk
        self._begin = self._now()

    def read(self) -> Cost:
        """Return the cost since `start`."""
        now = self._now()
        return Cost(now.bytes - self._begin.bytes, now.us - self._begin.us)

    def _now(self) -> Cost:
        stats = core.stats(self._device)
        us = stats["stall_us"] if self._virtual else time.perf_counter() * 1e6
        return Cost(stats["bytes_in"] + stats["bytes_out"], us)
