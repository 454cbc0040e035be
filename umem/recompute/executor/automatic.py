"""The option `recompute`: every model that a program trains is optimized automatically."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ...errors import UmemError

_log = logging.getLogger("umem")


class Automatic:
    """A hook that optimizes the outermost modules called in training.

    Their second call is recorded, and the third has a plan.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimized: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handle = register_module_forward_pre_hook(self._called)

    def remove(self) -> None:
        """Remove the hook, and restore the modules."""
        from ..optimize import deoptimize

        self._handle.remove()
        for model in list(self._optimized):
            deoptimize(model)

    def _called(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():  # first: Dynamo cannot trace the rest
            return
        # An outer module is called before its parts, which are then marked as seen.
        if module in self._seen or not module.training or not torch.is_grad_enabled():
            return
        with torch._C.DisableTorchFunction():  # the program's modes would see the queries
            if not any(parameter.requires_grad for parameter in module.parameters()):
                return
            self._seen.update(module.modules())
            self._optimize(module)

    def _optimize(self, module: nn.Module) -> None:
        from ..optimize import optimize
        from .module import optimized

        if any(optimized(part) is not None for part in module.modules()):
            return  # the program calls umem.optimize itself
        try:
            optimize(module, mode=self._mode)
        except UmemError as error:
            _log.warning("%s keeps all activations: %s", type(module).__name__, error)
        else:
            self._optimized.add(module)
            _log.info("%s is optimized, mode %s", type(module).__name__, self._mode)
