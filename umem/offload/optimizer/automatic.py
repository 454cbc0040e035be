"""The option `optimizer`: each optimizer of the program updates on the host, or a share of it."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import UmemError
from .paging import PagedOptimizer, is_paged, page_optimizer

_log = logging.getLogger("umem")


class Automatic:
    """A hook that pages each optimizer at its first step, as the option says.

    Args:
        share: of the bytes of the parameters that the host updates, 0 to 1; None: chosen from a
            recorded step.
    """

    def __init__(self, share: float | None) -> None:
        self._how: dict[str, Any] = (
            {"update": "auto"} if share is None else {"update": "host", "share": share}
        )
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._paged: weakref.WeakSet[PagedOptimizer] = weakref.WeakSet()  # their hooks keep them
        self._handle = register_optimizer_step_pre_hook(self._steps)

    def remove(self) -> None:
        """Remove the hook, and restore the optimizers."""
        self._handle.remove()
        for paged in list(self._paged):
            paged.remove()

    def _steps(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # torch passes the optimizer in front; what else it is given is a closure.
        if optimizer in self._seen or torch.compiler.is_compiling():
            return
        self._seen.add(optimizer)
        if is_paged(optimizer):
            return  # the program calls umem.page_optimizer itself
        if any(given is not None for given in (*args[1:], *kwargs.values())):
            _log.warning("%s is updated on the device: step() has a closure", _name(optimizer))
            return
        try:
            self._paged.add(page_optimizer(optimizer, **self._how))
        except UmemError as error:
            _log.warning("%s is updated on the device: %s", _name(optimizer), error)


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
