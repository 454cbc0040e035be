"""Hooks around the steps of all optimizers, which may come and go while a step is under way.

Torch iterates over its own dictionary of such hooks and raises an error if one is removed
meanwhile, as a signal handler or another hook does that calls `umem.disable()`. A single hook of
torch's therefore stays, from the first use on, and calls those that there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .untraced import untraced

Hook = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


class Handle:
    """A registered hook."""

    def __init__(self, hooks: dict[int, Hook], number: int) -> None:
        self._hooks, self._number = hooks, number

    def remove(self) -> None:
        """Remove the hook, which is not called any more."""
        self._hooks.pop(self._number, None)


class _Hooks:
    """The hooks of one kind, called in the order in which they came."""

    def __init__(self, register: str) -> None:
        self._register = register
        self._hooks: dict[int, Hook] = {}
        self._last = 0

    def __call__(self, hook: Hook) -> Handle:
        """Call the hook with the optimizer and the arguments of each step, until `remove`."""
        if not self._last:
            from torch.optim import optimizer

            untraced(self._run)
            getattr(optimizer, self._register)(self._step)
        self._last += 1
        self._hooks[self._last] = hook
        return Handle(self._hooks, self._last)

    def _step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Traced in a compiled step, which has no break where there is nothing to call.
        if self._hooks:
            self._run(optimizer, args, kwargs)

    def _run(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for number in list(self._hooks):
            hook = self._hooks.get(number)
            if hook is not None:
                hook(optimizer, args, kwargs)


before_steps = _Hooks("register_optimizer_step_pre_hook")
after_steps = _Hooks("register_optimizer_step_post_hook")
