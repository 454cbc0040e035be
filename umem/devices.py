"""What a device's link does: the numbers that planning and replay reckon with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceProfile:
    """A device as a planner sees it; the two directions of the link work at the same time."""

    name: str
    bytes_per_us_in: float  # host to device
    bytes_per_us_out: float  # device to host
    fault_us: float  # one group of page faults
    memory_bytes: int
    source: str  # where the figures come from
