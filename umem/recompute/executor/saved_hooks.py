"""Hooks of saved tensors that step aside where torch allows none, such as in torch.func.

torch refuses to begin such a part while any hooks are active, and the program would see that. Both
functions that refuse are context managers written in Python. Their code is replaced, as no function
object can be for all callers: Dynamo knows them by identity. Compiled code has its own hooks.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Generator, Iterator
from types import FunctionType
from typing import Any

import torch
import torch._functorch.eager_transforms as transforms

Hook = Callable[[Any], Any]

_autograd: Any = torch._C._autograd
_lock = threading.Lock()
_active: set[int] = set()  # the contexts in which hooks are active, on all threads


@contextlib.contextmanager
def saved_hooks(pack: Hook, unpack: Hook) -> Iterator[None]:
    """Run `pack` on what autograd saves within, and `unpack` where it is used.

    As in torch.autograd.graph.saved_tensors_hooks. The hooks are not active within parts of torch
    that refuse them.
    """
    ours = _aside(pack), _aside(unpack)
    try:  # from before the first change on: an interrupt may come at any line
        _replace(_active.add, id(ours))
        _autograd._push_saved_tensors_default_hooks(*ours)
        yield
    finally:
        if _top() == ours:
            _autograd._pop_saved_tensors_default_hooks()
        _replace(_active.discard, id(ours))


@contextlib.contextmanager
def without() -> Iterator[None]:
    """Put umem's hooks away within, where they are the innermost ones."""
    top = _top()
    if top is None or not getattr(top[0], "of_umem", False):
        yield
        return
    try:
        _autograd._pop_saved_tensors_default_hooks()
        yield
    finally:
        if _top() != top:
            _autograd._push_saved_tensors_default_hooks(*top)


def _top() -> tuple[Hook, Hook] | None:
    """Return this thread's innermost hooks."""
    found: tuple[Hook, Hook] | None = _autograd._top_saved_tensors_default_hooks(True)
    return found


def _aside(hook: Hook) -> Hook:
    """Return the hook, such that the program's modes of torch functions do not see its calls."""

    def aside(saved: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return hook(saved)

    aside.of_umem = True  # type: ignore[attr-defined]
    return aside


def _replace(change: Callable[[int], None], context: int) -> None:
    with _lock:
        change(context)
        for function, own, other in _REPLACED:
            function.__code__ = other if _active else own


def _disabled(error_message: str) -> Generator[None, None, None]:
    # It has torch's names, and not this module's.
    from umem.recompute.executor.saved_hooks import OWN, without

    with without(), OWN[0](error_message):
        yield


def _nested() -> Generator[int, None, None]:
    from umem.recompute.executor.saved_hooks import OWN, without

    with without(), OWN[1]() as level:
        yield level


_FUNCTIONS: tuple[Any, ...] = (
    inspect.unwrap(torch.autograd.graph.disable_saved_tensors_hooks),
    inspect.unwrap(transforms.grad_increment_nesting),
)
# torch's own context managers.
OWN: tuple[Any, ...] = tuple(
    contextlib.contextmanager(FunctionType(each.__code__, each.__globals__)) for each in _FUNCTIONS
)
_REPLACED = [
    (function, function.__code__, other.__code__)
    for function, other in zip(_FUNCTIONS, (_disabled, _nested), strict=True)
]
