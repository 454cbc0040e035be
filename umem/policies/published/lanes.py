"""Model of the link that plans use: one transfer at a time in each direction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...base.device_profiles import DeviceProfile


@dataclass(frozen=True)
class Link:
    """Duration of a transfer: a fixed time and one for each byte, in µs."""

    out_us: float
    out_us_per_byte: float
    in_us: float
    in_us_per_byte: float

    @classmethod
    def of(cls, device: DeviceProfile) -> Link:
        """Return the link of a device; its profile has no fixed times."""
        return cls(0.0, 1 / device.bytes_per_us_out, 0.0, 1 / device.bytes_per_us_in)

    def time_out(self, count: int) -> float:
        """Return the time of a transfer from device to host, in µs."""
        return self.out_us + self.out_us_per_byte * count

    def time_in(self, count: int) -> float:
        """Return the time of a transfer from host to device, in µs."""
        return self.in_us + self.in_us_per_byte * count


def first_come(transfers: Iterable[tuple[float, float]]) -> list[float]:
    """Return the ends of transfers (ready at, takes) on one lane that runs them in this order."""
    ends: list[float] = []
    free = float("-inf")
    for ready, takes in transfers:
        free = max(ready, free) + takes
        ends.append(free)
    return ends


def latest_starts(transfers: Iterable[tuple[float, float]]) -> list[float]:
    """Return the latest starts of transfers (due at, takes), the last due first, on one lane."""
    starts: list[float] = []
    following = float("inf")
    for due, takes in transfers:
        following = min(due, following) - takes
        starts.append(following)
    return starts
