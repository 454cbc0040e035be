"""Modules that a planned program moves: `cuda()`, `to()`, `half()`, `to_empty()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_Change = Callable[[torch.Tensor], torch.Tensor]


def apply() -> Callable[..., nn.Module]:
    """Return a `Module._apply` that moves fake tensors as torch moves those with data.

    Parameters keep their identity if they can: an optimizer that was made before the move, and all
    that has a parameter, has the moved one. torch would swap fake parameters, which it cannot do
    with tensors that have weak references. Wrappers of tensors, such as DTensor, and parameters
    that leave the device `meta` are new ones.
    """
    moves = _Moves()
    return lambda module, fn, recurse=True: moves.apply(module, fn, recurse)


class _Moves:
    def __init__(self) -> None:
        # New parameters by the id of the old ones, which live meanwhile, so that no id is reused.
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._depth = 0

    def apply(self, module: Any, fn: _Change, recurse: bool) -> nn.Module:
        self._depth += 1
        try:
            for child in module.children() if recurse else ():
                child._apply(fn)  # a module may have its own
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    # The scope learns the role of the new memory.
                    module.register_parameter(name, self._moved(parameter, fn))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._made.clear()
        found: nn.Module = module
        return found

    def _moved(self, parameter: nn.Parameter, fn: _Change) -> nn.Parameter:
        if id(parameter) in self._made:  # shared by several modules
            return self._made[id(parameter)][1]
        gradient = parameter.grad
        with torch.no_grad():
            new = fn(parameter)
            if _can_take(parameter, new):
                parameter.data = new
                if gradient is not None:
                    parameter.grad = fn(gradient)
                return parameter
        if not isinstance(new, nn.Parameter):
            new = nn.Parameter(new, requires_grad=parameter.requires_grad)
        self._made[id(parameter)] = (parameter, new)
        return new


def _can_take(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Return whether a tensor's `data` can be set to other data."""
    alike: bool = torch._has_compatible_shallow_copy_type(tensor, data)
    return alike and not is_traceable_wrapper_subclass(data)
