"""The device that umem manages: its name, and the profile that plans are computed with."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import sys
from collections.abc import Mapping

from . import device_profiles
from .device_profiles import DeviceProfile
from .native import core
from .units import DAY_US, MIB

_log = logging.getLogger("umem")

_GPU_DEFAULT = "h200-pcie5"
_SAMPLE = 64 * MIB  # that a direction must have moved until its rate is known


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
    if options.device == "cuda":
        number = _current_gpu() if device is None else device
        return _measured(profile_of(gpu_name(number)), core.stats(number), "timed")
    found = device_profiles.find(options.profile)
    return _with_disk(found) if options.disk else found


def for_plans(profile: DeviceProfile) -> DeviceProfile:
    """Return the figures of a device as plans take them.

    A limit of the bytes that a disk is written in a day is one of the rate.
    """
    limit = core.current_options().disk_bytes_a_day / DAY_US or math.inf
    rate = min(profile.bytes_per_us_out, limit)
    return dataclasses.replace(profile, bytes_per_us_out=rate)


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
        number = _current_gpu() if device is None else device
        return not getattr(torch.cuda.get_device_properties(number), "is_integrated", False)
    found = core.probe_cuda()["devices"][device or 0 :]
    return not (found and found[0]["integrated"])


def _with_disk(profile: DeviceProfile) -> DeviceProfile:
    """Return the profile with the rates that transfers to and from the disk had so far."""
    assumed = device_profiles.find(device_profiles.DISK)
    profile = dataclasses.replace(
        profile, bytes_per_us_in=assumed.bytes_per_us_in, bytes_per_us_out=assumed.bytes_per_us_out
    )
    return _measured(profile, core.stats(None), "disk")


def _measured(profile: DeviceProfile, stats: Mapping[str, int], kind: str) -> DeviceProfile:
    """Return the profile with the rates of the directions in which enough was moved."""

    def rate(way: str, nominal: float) -> float:
        moved, us = stats[f"{kind}_bytes_{way}"], stats[f"{kind}_busy_{way}_us"]
        return moved / us if moved >= _SAMPLE and us > 0 else nominal

    return dataclasses.replace(
        profile,
        bytes_per_us_in=rate("in", profile.bytes_per_us_in),
        bytes_per_us_out=rate("out", profile.bytes_per_us_out),
        source=f"{profile.source}; the link's rates are measured, once enough was moved",
    )


def _current_gpu() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_device())


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
