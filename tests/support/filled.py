"""Tensors of a given size, and a module of them."""

from __future__ import annotations

import torch

MIB = 1 << 20


def full(mib: float, value: float = 1.0) -> torch.Tensor:
    """float32, all of one value."""
    return torch.full((int(mib * MIB) // 4,), value)


class Net(torch.nn.Module):
    """Two layers, one of them under two names, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(1024, 1024)  # 4 MiB and 4 KiB
        self.second = torch.nn.Linear(1024, 1024)
        self.tied = self.first
        self.register_buffer("mask", torch.ones(1024, 1024))
