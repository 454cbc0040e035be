"""The option `optimizer`: all optimizers of the program update on the host, or a share does."""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from ...base.step_hooks import before_steps
from ...errors import UmemError
from .paging import PagedOptimizer, is_paged, page_optimizer

_log = logging.getLogger("umem")


class Automatic:
    """A hook that pages each optimizer at its first step, according to the option.

    Args:
        share: the host's share of the parameters' bytes, 0 to 1; None: chosen from a recorded step.
    """

    def __init__(self, share: float | None) -> None:
        self._how: dict[str, Any] = (
            {"update": "auto"} if share is None else {"update": "host", "share": share}
        ) | {"_automatic": True}
        self._seen: weakref.WeakKeyDictionary[Optimizer, weakref.ref[PagedOptimizer] | None] = (
            weakref.WeakKeyDictionary()
        )  # a paged one is kept by its hooks on the optimizer
        self._handle = before_steps(self._steps)

    def remove(self, *, give_back: bool = True) -> None:
        """Remove the hook, and restore the optimizers; `give_back`: return states to the device."""
        self._handle.remove()
        with contextlib.ExitStack() as stack:  # all, even if one raises
            for paged in self._paged():
                stack.callback(paged.remove, give_back=give_back)
        self._seen.clear()

    def check(self) -> None:
        """Refuse to turn umem off in the middle of a step.

        Raises:
            StateError: an optimizer updates.
        """
        for paged in self._paged():
            paged.check_remove("umem.disable()")

    def _paged(self) -> list[PagedOptimizer]:
        known = [each() for each in list(self._seen.values()) if each is not None]
        return [paged for paged in known if paged is not None]

    def _steps(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        if optimizer not in self._seen:
            self._seen[optimizer] = None
            self._begin(optimizer, any(x is not None for x in (*args[1:], *kwargs.values())))

    def _begin(self, optimizer: Optimizer, closure: bool) -> None:
        if is_paged(optimizer):
            return  # the program calls umem.page_optimizer itself
        reason: object = "step() has a closure" if closure else None
        if not type(optimizer).__module__.startswith("torch.optim"):
            reason = "its class is not torch.optim's"
        if reason is None:
            try:
                self._seen[optimizer] = weakref.ref(page_optimizer(optimizer, **self._how))
                return
            except UmemError as error:
                reason = error
        _log.warning("%s is updated on the device: %s", type(optimizer).__name__, reason)
