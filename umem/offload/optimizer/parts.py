"""An optimizer's step for some of its parameters, bit-identical to the whole step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from ...capture.list_parts import overlaps
from ...errors import StateError

# Methods that no step calls, and the step itself, which torch wraps in each class.
_BESIDE_STEP = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")


class OfOptimizer:
    """An object that an optimizer's hooks keep alive, and that does not keep the optimizer alive.

    Else both, with model and states, would remain until the garbage collector runs.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._reference = weakref.ref(optimizer)

    @property
    def _optimizer(self) -> Optimizer:
        found = self._reference()
        if found is None:
            raise StateError(
                "the optimizer that umem.page_optimizer() changed is gone, but its parameters are "
                "still trained; keep the optimizer until then, or call remove() on what "
                "page_optimizer() returned"
            )
        return found


def is_per_parameter(optimizer: Optimizer) -> bool:
    """Return whether each parameter's update depends only on its own gradient and state.

    This is known of the optimizers of `torch.optim` except LBFGS. A class with its own `step`, or
    methods that `step` calls, may do anything in it, such as clipping by the norm of all gradients.
    """
    if isinstance(optimizer, LBFGS) or not _is_of_torch(_plain_step(optimizer)):
        return False
    classes = type(optimizer).__mro__
    first = next(i for i, cls in enumerate(classes) if _is_of_torch(cls))
    return not any(
        callable(value) and hasattr(classes[first], name)
        for cls in classes[:first]
        for name, value in vars(cls).items()
        if not name.startswith(("__", "register_")) and name not in _BESIDE_STEP
    )


def _is_of_torch(what: Any) -> bool:
    module: str = what.__module__
    return module.startswith("torch.optim.")


def overlapping(parameters: Iterable[Tensor]) -> set[int]:
    """Return the ids of parameters that share memory with another one, such as tied by `.data`."""
    return overlaps((id(parameter), parameter) for parameter in parameters)


def update(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Run `optimizer.step()` for these parameters, without its hooks."""
    _plain_step(optimizer)(part_of(optimizer, parameters))


def part_of(optimizer: Optimizer, parameters: Iterable[Tensor]) -> Optimizer:
    """Return the optimizer as if it had only these parameters.

    It shares the state, and has the options that the groups have now. The optimizer itself is not
    touched, so it can be read, and run other parts of its step, at the same time.
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
    """Return the class's step, without the hooks of torch and the wrappers of schedulers."""
    plain: Callable[[Optimizer], Any] = _steps_of(optimizer)[-1]
    return plain


def hooked_step(optimizer: Optimizer) -> Any:
    """Return the function of the class that runs the hooks of a step, and then the step itself."""
    return _steps_of(optimizer)[-2:][0]


def _steps_of(optimizer: Optimizer) -> list[Any]:
    """Return the class's step and what it wraps, to the plain step.

    Torch wraps the step of each class in the one that runs its hooks, and marks it. Dynamo wraps
    that one again for some classes, with a copy of the mark.
    """
    found: list[Any] = [type(optimizer).step]
    while getattr(found[-1], "hooked", False):
        found.append(found[-1].__wrapped__)
    return found
