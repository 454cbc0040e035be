"""An optimizer's step for some of its parameters, with the same values to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer


def is_per_parameter(optimizer: Optimizer) -> bool:
    """Whether each parameter's update depends on its own gradient and state alone.

    That is known of the optimizers of `torch.optim`, but for LBFGS. A class with a `step` of its
    own may do anything in it, as clipping by the norm of all gradients.
    """
    module: str = _plain_step(optimizer).__module__
    return module.startswith("torch.optim.") and not isinstance(optimizer, LBFGS)


def update(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """What `optimizer.step()` does, for these parameters, and without its hooks."""
    _plain_step(optimizer)(part_of(optimizer, parameters))


def part_of(optimizer: Optimizer, parameters: Iterable[Tensor]) -> Optimizer:
    """The optimizer as if it had these parameters only.

    It shares the state, and has the options that the groups have now. The optimizer itself is not
    touched, so that it may be looked at, and take other parts of its step, at the same time.
    """
    chosen = {id(parameter) for parameter in parameters}
    groups = []
    for group in optimizer.param_groups:
        mine = [parameter for parameter in group["params"] if id(parameter) in chosen]
        if mine:
            groups.append({**group, "params": mine})
    part = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__, param_groups=groups)
    return part


def _plain_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The class's, below the hooks that torch puts around it, and schedulers around an object's."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]
