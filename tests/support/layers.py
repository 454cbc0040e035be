"""Layers with weights as large as those of linear ones, and steps that multiply no matrices."""

from __future__ import annotations

from collections.abc import Callable

import torch

Step = Callable[[int], float]  # the batch's rows -> the loss


class Scale(torch.nn.Module):
    """Multiplies each of up to `width` rows with a row of its weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(width, width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight[: len(x)]


def training(layers: int, width: int) -> tuple[torch.nn.Module, Step]:
    """Square layers, and a step of plain SGD."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[Scale(width) for _ in range(layers)])
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step(rows: int) -> float:
        optimizer.zero_grad()
        loss = net(torch.randn(rows, width)).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return net, step
