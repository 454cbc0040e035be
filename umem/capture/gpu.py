"""The GPU that a planned program is told about."""

from __future__ import annotations

from typing import NamedTuple

from ..base.device_profiles import DISK, DeviceProfile


class Gpu(NamedTuple):
    """The answers that a program gets about its GPU; the default can do what each known one can."""

    name: str = "CUDA"
    capability: tuple[int, int] = (8, 0)
    processors: int = 108
    memory_bytes: int = 80 << 30


# The drivers' names, compute capabilities and numbers of multiprocessors, by profile.
_GPUS = {
    "a100-pcie4": ("NVIDIA A100-PCIE-40GB", (8, 0), 108),
    "rtx4090-pcie4": ("NVIDIA GeForce RTX 4090", (8, 9), 128),
    "h200-pcie5": ("NVIDIA H200", (9, 0), 132),
    "gh200-c2c": ("NVIDIA GH200 480GB", (9, 0), 132),
}


def gpu_of(profile: DeviceProfile) -> Gpu:
    """Return the GPU of a profile; of one that is not umem's, the default with its memory."""
    if profile.name == DISK:
        return Gpu()
    known = _GPUS.get(profile.name, (profile.name, Gpu().capability, Gpu().processors))
    return Gpu(*known, memory_bytes=profile.memory_bytes)
