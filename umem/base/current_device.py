"""The device that umem manages: its name, and the profile that plans are computed with."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys

from . import device_profiles
from .device_profiles import DeviceProfile
from .native import core
from .units import DAY_US, MIB

_log = logging.getLogger("umem")

_GPU_DEFAULT = "h200-pcie5"
_DISK_SAMPLE = 64 * MIB  # that a direction must have moved until its rate is known


@functools.cache
def profile_of(gpu: str) -> DeviceProfile:
    """Return the figures that plans for this GPU are computed with."""
    found = device_profiles.find(_nearest_profile(gpu))
    _log.info("plans use the figures of device profile %s: %s", found.name, found.source)
    return found


def profile(device: int | None = None) -> DeviceProfile:
    """Return the figures of a device that umem manages.

    Args:
        device: the device's number; None: the current device.
    """
    options = core.current_options()
    if options.device == "soft":
        found = device_profiles.find(options.profile)
        return _with_disk(found) if options.disk else found
    return profile_of(gpu_name(device))


def hides_transfers(device: int | None = None) -> bool:
    """Return whether a device moves bytes while it computes; None stands for the current device.

    It does not on the software device, where the CPU does both, unless it has a disk; nor on an
    integrated GPU, where both share the bandwidth of the host's memory.
    """
    options = core.current_options()
    if options.device == "soft":
        return bool(options.disk)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        number = torch.cuda.current_device() if device is None else device
        return not getattr(torch.cuda.get_device_properties(number), "is_integrated", False)
    found = core.probe_cuda()["devices"][device or 0 :]
    return not (found and found[0]["integrated"])


def _with_disk(profile: DeviceProfile) -> DeviceProfile:
    """Return the profile with the rates that transfers to and from the disk had so far.

    A limit of the bytes written in a day is one of the rate.
    """
    stats = core.stats(None)
    assumed = device_profiles.find(device_profiles.DISK)
    rates = []
    for moved, busy, unknown in (
        ("disk_bytes_in", "disk_busy_in_us", assumed.bytes_per_us_in),
        ("disk_bytes_out", "disk_busy_out_us", assumed.bytes_per_us_out),
    ):
        measured = stats[moved] >= _DISK_SAMPLE and stats[busy] > 0
        rates.append(stats[moved] / stats[busy] if measured else unknown)
    if limit := core.current_options().disk_bytes_a_day:
        rates[1] = min(rates[1], limit / DAY_US)
    return dataclasses.replace(
        profile, bytes_per_us_in=rates[0], bytes_per_us_out=rates[1],
        source="rates that this program's transfers had",
    )  # fmt: skip


def _nearest_profile(gpu: str) -> str:
    """Return the profile of the same GPU model, or the default if no name matches."""
    words = gpu.lower().replace("-", " ").split()
    for name in device_profiles.names():
        if name.split("-")[0].removeprefix("rtx") in words or name.split("-")[0] in words:
            return name
    return _GPU_DEFAULT


def gpu_name(device: int | None = None) -> str:
    """Return the name of a GPU that the program uses; None stands for the current GPU."""
    torch = sys.modules.get("torch")
    if torch is None:  # a program of CuPy or cuda.core
        found = core.probe_cuda()["devices"][device or 0 :]
        return found[0]["name"] if found else "cuda"
    # The query starts CUDA, and a process that started CUDA cannot fork.
    used: bool = torch.cuda.is_initialized()
    return str(torch.cuda.get_device_name(device)) if used else "cuda"
