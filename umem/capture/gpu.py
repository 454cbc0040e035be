"""The GPU that a planned program is told about."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..base.device_profiles import DISK, DeviceProfile


class Gpu(NamedTuple):
    """The answers that a program gets about its GPU; the default can do what each known one can."""

    name: str = "CUDA"
    capability: tuple[int, int] = (8, 0)
    processors: int = 108
    memory_bytes: int = 80 << 30


# The drivers' names, compute capabilities and numbers of multiprocessors.
_A100 = ("NVIDIA A100-PCIE-40GB", (8, 0), 108)
_H100 = ("NVIDIA H100 80GB HBM3", (9, 0), 132)
_H200 = ("NVIDIA H200", (9, 0), 132)
# By profile, and by node.
_GPUS = {
    "a100-pcie4": _A100,
    "a100-pcie4x4": _A100,
    "rtx4090-pcie4": ("NVIDIA GeForce RTX 4090", (8, 9), 128),
    "h100-pcie5": _H100,
    "h100x8": _H100,
    "h200-pcie5": _H200,
    "h200x8": _H200,
    "gh200-c2c": ("NVIDIA GH200 480GB", (9, 0), 132),
}


def gpu_of(profile: DeviceProfile) -> Gpu:
    """Return the GPU of a profile; of one that is not umem's, the default with its memory."""
    name = re.split("[+/]", profile.name)[0]  # without a link of its own, or a node's busy devices
    if name == DISK:
        return Gpu()
    known = _GPUS.get(name, (profile.name, Gpu().capability, Gpu().processors))
    return Gpu(*known, memory_bytes=profile.memory_bytes)
