"""Techniques of plain torch to need less device memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from umem.demo.training import Training

if TYPE_CHECKING:
    from torch import Tensor

Undo = Callable[[], None]


def use(training: Training, name: str) -> Undo:
    """Train with `plain`, `save_on_cpu` or `checkpoint` from here on; returns what ends it."""
    known = {"plain": _plain, "save_on_cpu": _save_on_cpu, "checkpoint": _checkpoint}
    if name not in known:
        raise ValueError(f"technique {name!r} is unknown; allowed: {', '.join(known)}")
    return known[name](training)


def _plain(_: Training) -> Undo:
    return lambda: None


def _save_on_cpu(training: Training) -> Undo:
    """Offload the tensors that autograd saves to pinned host memory until they are needed."""
    from torch.autograd.graph import save_on_cpu

    whole = training.batch_loss

    def batch_loss(i: int) -> Tensor:
        with save_on_cpu(pin_memory=True):
            return whole(i)

    training.batch_loss = batch_loss

    def undo() -> None:
        training.batch_loss = whole

    return undo


def _checkpoint(training: Training) -> Undo:
    """Recompute each block in the backward pass instead of keeping its activations."""
    import nets
    from torch.utils.checkpoint import checkpoint

    blocks: list[Any] = [m for m in training.net.modules() if isinstance(m, nets.BLOCKS)]
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def undo() -> None:
        for block in blocks:
            del block.forward

    return undo
