"""The link as plans reckon with it: one transfer at a time in each direction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..devices import DeviceProfile


@dataclass(frozen=True)
class Link:
    """What a transfer takes: a fixed time and one for each byte, in µs."""

    out_us: float
    out_us_per_byte: float
    in_us: float
    in_us_per_byte: float

    @classmethod
    def of(cls, device: DeviceProfile) -> Link:
        """The link of a device; its profile has no fixed times."""
        return cls(0.0, 1 / device.bytes_per_us_out, 0.0, 1 / device.bytes_per_us_in)

    def time_out(self, count: int) -> float:
        """Device to host, µs."""
        return self.out_us + self.out_us_per_byte * count

    def time_in(self, count: int) -> float:
        """Host to device, µs."""
        return self.in_us + self.in_us_per_byte * count


def first_come(transfers: Iterable[tuple[float, float]]) -> list[float]:
    """When transfers (ready at, takes) end on one lane that runs them in this order."""
    ends: list[float] = []
    free = float("-inf")
    for ready, takes in transfers:
        free = max(ready, free) + takes
        ends.append(free)
    return ends


def latest_starts(transfers: Iterable[tuple[float, float]]) -> list[float]:
    """When transfers (due at, takes), the last due first, must start on one lane to be in time."""
    starts: list[float] = []
    following = float("inf")
    for due, takes in transfers:
        following = min(due, following) - takes
        starts.append(following)
    return starts
