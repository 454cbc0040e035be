"""Tensors of a given size."""

from __future__ import annotations

import torch

MIB = 1 << 20


def full(mib: float, value: float = 1.0) -> torch.Tensor:
    """float32, all of one value."""
    return torch.full((int(mib * MIB) // 4,), value)
