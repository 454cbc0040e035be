"""A policy of a test's own under its name, and steps that it can plan."""

from __future__ import annotations

from collections.abc import Callable

import torch

Step = Callable[[int], float]  # the batch's rows -> the loss


def linear(layers: int, width: int) -> tuple[torch.nn.Module, Step]:
    """Square layers without biases, and a step of plain SGD."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step(rows: int) -> float:
        optimizer.zero_grad()
        loss = net(torch.randn(rows, width)).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return net, step
