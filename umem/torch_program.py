"""What torch tells of a running program: an op's phase, its tensors, what its results are for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

# Ops that write all of the tensor that they change, without reading it.
OVERWRITES = {"copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_", "random_",
              "exponential_", "log_normal_", "cauchy_", "geometric_", "_foreach_zero_",
              "_foreach_copy_"}  # fmt: skip


def phase(stepping: bool) -> str:
    """Of an op that runs now on this thread: forward, backward or optimizer.

    Args:
        stepping: an optimizer is inside its step, or one raised in it.
    """
    if torch._C._current_graph_task_id() != -1:
        return "backward"
    # With gradients on it is the closure of the optimizer's step: a forward pass.
    return "optimizer" if stepping and not torch.is_grad_enabled() else "forward"


def result_tag(phase: str, inputs: Collection[torch.Tensor]) -> str:
    """What an op leaves behind; gradients are known once they are in place."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return "activation"
    if phase == "optimizer":
        return "optimizer"
    return "input" if phase == "forward" and not inputs else "temp"


def tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those in arguments or states, in lists, tuples and mappings too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)
        elif isinstance(value, Mapping):
            yield from tensors(value.values())


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether it spans all of its storage."""
    return tensor.numel() * tensor.itemsize >= tensor.untyped_storage().nbytes()
