"""Tensors that are views of one block move on their own, as separate ones do, where steps show them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402

MIB = 1 << 20
COUNT, SIZE = 8, 1 << 20  # tensors of 4 MiB
STEPS, FIRST = 12, 5  # the first step whose figures count


def separate(count: int) -> list[torch.Tensor]:
    return [torch.full((SIZE,), i / count) for i in range(count)]


def flat(count: int) -> list[torch.Tensor]:
    """The same as views of one block."""
    block = torch.empty(count * SIZE)
    views = list(block.view(count, SIZE).unbind())
    for i, view in enumerate(views):
        view.fill_(i / count)
    return views


def train(make: Callable[[int], list[torch.Tensor]], **options: Any) -> tuple[float, list[int]]:
    """A forward pass over weights, a backward one that makes gradients, an update of each.

    Returns:
        a checksum of all results, and the bytes moved in each step from `FIRST` on.
    """
    moved = []
    with umem.enable(device="soft", **options):
        weights, gradients = make(COUNT), make(COUNT)
        for step in range(STEPS):
            before = umem.stats()
            x = torch.full((SIZE,), 1 + step / 64)
            for weight in weights:
                x = x * weight + 0.5
            for weight, gradient in reversed(list(zip(weights, gradients, strict=True))):
                torch.mul(weight, 0.5, out=gradient)
                gradient.add_(x, alpha=1e-3)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(gradient, alpha=1e-2)
            umem.step()
            after = umem.stats()
            if step >= FIRST:
                moved.append(after.bytes_in + after.bytes_out - before.bytes_in - before.bytes_out)
        total = sum(float(t.double().sum()) for t in (*weights, *gradients))
        del x, weights, gradients, weight, gradient
        gc.collect()
    return total, moved
