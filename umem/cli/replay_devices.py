"""``umem replay`` of a trace of several devices: their profile in a node, and their totals."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..base.units import GIB, format_bytes
from ..errors import ConfigError
from .base import node_of

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile
    from ..simulation.replay import Result


class Failure(NamedTuple):
    """A replay that failed."""

    policy: str
    budget: int
    device: str
    error: str


Row: TypeAlias = "Result | Failure"


@dataclass(frozen=True)
class Total:
    """All devices under one policy, budget and profile. Sizes in bytes, times in µs."""

    policy: str
    budget: int  # sum over devices
    device: str
    step_us: float  # the slowest device's
    compute_us: float  # the same device's
    bytes_in: int
    bytes_out: int
    peak_host: int  # sum over devices

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON; `trace_device` is a number in the rows of one device."""
        return {"trace_device": "all", **dataclasses.asdict(self)}


def profile(args: argparse.Namespace, devices: int) -> DeviceProfile:
    """Return a device of `--node` while `devices` of it, or `--busy`, move bytes.

    Raises:
        ConfigError: no such node, too few devices in it, or a device in addition to it.
    """
    node = node_of(args)
    busy = devices if args.busy is None else args.busy
    if busy < devices:
        raise ConfigError(f"--busy {busy}; allowed: at least the trace's {devices} devices")
    return node.profile(busy)


def totals(rows: Mapping[int, Sequence[Row]]) -> list[Total]:
    """Return the sums over devices of replays in the same order; none where one failed."""
    found = []
    for same in zip(*rows.values(), strict=True):
        results = [row for row in same if not isinstance(row, Failure)]
        if len(results) < len(same):
            continue
        slowest = max(results, key=lambda row: row.step_us)
        found.append(
            Total(
                policy=slowest.policy,
                budget=sum(row.budget for row in results),
                device=slowest.device,
                step_us=slowest.step_us,
                compute_us=slowest.compute_us,
                bytes_in=sum(row.bytes_in for row in results),
                bytes_out=sum(row.bytes_out for row in results),
                peak_host=sum(row.peak_host for row in results),
            )
        )
    return found


def render(found: Sequence[Total]) -> str:
    """Format the totals: the slowest device's time, and the bytes moved by all devices."""
    lines = [
        f"  {row.policy:<16} {format_bytes(row.budget):>10}  {row.device}  "
        f"{row.step_us / 1e3:.2f} ms a step, {_times(row)} x compute, "
        f"{row.bytes_in / GIB:.2f} GiB in, {row.bytes_out / GIB:.2f} GiB out, "
        f"{format_bytes(row.peak_host)} on the host"
        for row in found
    ]
    head = "all devices: the slowest one's time, and the bytes moved by all"
    note = "each is replayed alone; waits for other devices are as recorded"
    return "\n".join([head, *lines, note])


def _times(row: Total) -> str:
    return f"{row.step_us / row.compute_us:.3f}" if row.compute_us else "-"
