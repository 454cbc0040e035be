"""Master copies: float32 values of lower-precision parameters, kept only on the host.

Source: Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

NAME = "master"  # the copy's name in a parameter's state
_LOW = (torch.float16, torch.bfloat16)
_COUNTS = ("step", "mu_product", "eta", "mu")  # in float32 with every parameter

State = dict[str, Any]


def has_master(parameter: Tensor) -> bool:
    """Return whether its type has master copies."""
    return parameter.dtype in _LOW


class Master:
    """The master copy of one parameter during an update.

    Args:
        copy: the parameter's values on the host, with their gradient.
        known: the master copy after the last update, which changes with it; None before the first.
    """

    def __init__(self, copy: Tensor, known: Tensor | None) -> None:
        assert copy.grad is not None
        self._copy = copy
        self._begun = known is not None
        self.values = torch.empty_like(copy, dtype=torch.float32) if known is None else known
        self.values.grad = torch.empty_like(copy.grad, dtype=torch.float32)
        self.kept = self.values  # where they are between updates

    def follow(self) -> None:
        """Take the gradient, and the program's changes since the last update."""
        copy, values = self._copy, self.values
        assert copy.grad is not None
        assert values.grad is not None
        values.grad.copy_(copy.grad)
        if not self._begun:
            values.copy_(copy)
            return
        changed = values.to(copy.dtype) != copy
        if bool(changed.any()):
            values.copy_(torch.where(changed, copy.float(), values))

    def round(self) -> None:
        """Round the new values to the parameter's type."""
        self._copy.copy_(self.values)
        self.values.grad = None


def without(state: State | None) -> State | None:
    """Return the state without the master copy; None if it has nothing else."""
    if state is None:
        return None
    return {name: value for name, value in state.items() if name != NAME} or None


def lowered(state: State, parameter: Tensor) -> State:
    """Return the plain optimizer's state: in the parameter's type, without master."""
    return {
        name: value.to(parameter.dtype) if _is_wide(value) and name not in _COUNTS else value
        for name, value in state.items()
        if name != NAME
    }


def raised(state: State) -> State:
    """Return the state with float32 tensors in place of those in the parameter's type."""
    low = {n: v for n, v in state.items() if isinstance(v, Tensor) and v.dtype in _LOW}
    return {**state, **{name: value.float() for name, value in low.items()}}


def in_checkpoint(optimizer: Optimizer, saved: dict[str, Any]) -> dict[Tensor, State]:
    """Return the states in float32 that a `state_dict` has for parameters of lower precision.

    `load_state_dict` rounds them to the parameter's type.
    """
    numbers = (number for group in saved["param_groups"] for number in group["params"])
    mine = (parameter for group in optimizer.param_groups for parameter in group["params"])
    found: dict[Tensor, State] = {}
    for number, parameter in zip(numbers, mine, strict=False):  # torch refuses differences
        state = saved["state"].get(number, {})
        if has_master(parameter) and NAME in state:
            found[parameter] = {name: v for name, v in state.items() if _is_wide(v)}
    return found


def added_bytes(parameter: Tensor, state_bytes: int) -> int:
    """Return the bytes of its master copy and wider state types beyond the plain state."""
    return 4 * parameter.numel() + state_bytes if has_master(parameter) else 0


def _is_wide(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32
