"""Workloads, and the training steps of most of them, on tensors that may have no data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    Made = tuple[nn.Module, Callable[[], None]]
    Batch = tuple[Tensor | tuple[Tensor, ...], Tensor]  # inputs and labels

Precision = Literal["float32", "amp", "bfloat16"]  # weights and activations; amp: autocast
Kind = Literal["sgd", "adagrad", "adamw"]  # sgd: with momentum


@dataclass(frozen=True)
class Workload:
    """A step to trace. `study_gib` is the peak of live bytes that the planning study found."""

    name: str
    title: str
    make: Callable[[], Made]
    study_gib: float | None = None
    smoke: bool = False  # small: for tests, not for figures


def training(
    make: Callable[[], nn.Module],
    batches: Callable[[], Sequence[Batch]],
    precision: Precision,
    kind: Kind,
) -> Made:
    """Build a step: gradients of all batches add up, then weights that are trained are updated.

    The loss is cross entropy over the outputs' last dimension, in float32.
    """
    import torch

    with default_dtype(torch.bfloat16 if precision == "bfloat16" else torch.float32):
        net = make()
        data = batches()
    optimizer = updates(net, kind)

    def step() -> None:
        for inputs, labels in data:
            kind = labels.device.type
            with torch.autocast(kind, torch.bfloat16, enabled=precision == "amp"):
                scores = net(*inputs) if isinstance(inputs, tuple) else net(inputs)
            # Inside the call, as only the scores are held by a variable.
            loss = torch.nn.functional.cross_entropy(
                scores.flatten(0, -2).float(), labels.flatten()
            )
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return net, step


def updates(net: nn.Module, kind: Kind) -> torch.optim.Optimizer:
    """Return the optimizer of all weights of `net` that are trained, tensor by tensor."""
    import torch

    weights = [weight for weight in net.parameters() if weight.requires_grad]
    if kind == "adamw":
        return torch.optim.AdamW(weights, foreach=False)
    if kind == "adagrad":
        return torch.optim.Adagrad(weights, foreach=False)
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9, foreach=False)


def texts(vocabulary: int, shapes: Sequence[tuple[int, int]], *, last: bool = False) -> list[Batch]:
    """Return batches of tokens, labelled at every token, or only after the last one."""
    import torch

    return [
        (
            torch.randint(vocabulary, shape),
            torch.randint(vocabulary, shape[:1] if last else shape),
        )
        for shape in shapes
    ]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the dtype of tensors made inside: a fake module cannot be converted later."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
