"""Hooks around the steps of all optimizers, which may come and go while a step is under way.

Torch iterates over its own dictionary of such hooks and raises an error if one is removed
meanwhile, as a signal handler does that calls `umem.disable()` in the middle of a step. One hook of
torch's therefore calls all of umem's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .untraced import untraced

Hook = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


class Handle:
    """A registered hook."""

    def __init__(self, remove: Callable[[int], None], number: int) -> None:
        self._remove, self._number = remove, number

    def remove(self) -> None:
        """Remove the hook, which is not called any more."""
        self._remove(self._number)


class _Hooks:
    """The hooks of one kind, called in the order in which they came."""

    def __init__(self, register: str) -> None:
        self._register = register
        self._of_torch: Any = None  # what removes torch's hook
        self._hooks: dict[int, Hook] = {}
        self._last = 0
        self._under_way: list[None] = []  # an item for each thread, or step, that is in `_run`

    def __call__(self, hook: Hook) -> Handle:
        """Call the hook with the optimizer and the arguments of each step, until `remove`."""
        self._last += 1
        self._hooks[self._last] = hook
        if self._of_torch is None:
            from torch.optim import optimizer

            self._of_torch = getattr(optimizer, self._register)(untraced(self._run))
        return Handle(self._remove, self._last)

    def _remove(self, number: int) -> None:
        self._hooks.pop(number, None)
        if not self._hooks and not self._under_way and self._of_torch is not None:
            self._of_torch.remove()
            self._of_torch = None

    def _run(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._under_way.append(None)
        try:
            for number in list(self._hooks):
                hook = self._hooks.get(number)
                if hook is not None:
                    hook(optimizer, args, kwargs)
        finally:
            self._under_way.pop()


before_steps = _Hooks("register_optimizer_step_pre_hook")
after_steps = _Hooks("register_optimizer_step_post_hook")
