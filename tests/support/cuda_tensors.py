"""Tensors that a test fills and checks on a device whose kernels may compute nothing else."""

from __future__ import annotations

import torch

MIB = 1 << 20


def full(value: float, mib: int = 2) -> torch.Tensor:
    """A CUDA tensor of `mib` MiB of floats, all `value`."""
    return torch.full((mib * MIB // 4,), value, device="cuda")


def holds(tensor: torch.Tensor, value: float) -> bool:
    """True if all elements are `value`."""
    return bool(tensor.cpu().eq(value).all())
