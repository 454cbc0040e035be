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
_active = 0  # on all threads


@contextlib.contextmanager
def saved_hooks(pack: Hook, unpack: Hook) -> Iterator[None]:
    """Run `pack` on what autograd saves within, and `unpack` where it is used.

    As in torch.autograd.graph.saved_tensors_hooks. The hooks are not active within parts of torch
    that refuse them.
    """
    ours = _aside(pack), _aside(unpack)
    _replace(1)
    try:
        _autograd._push_saved_tensors_default_hooks(*ours)
        try:
            yield
        finally:
            _autograd._pop_saved_tensors_default_hooks()
    finally:
        _replace(-1)


@contextlib.contextmanager
def without() -> Iterator[None]:
    """Put umem's hooks away within, where they are the innermost ones."""
    top = _autograd._top_saved_tensors_default_hooks(True)
    if top is None or not getattr(top[0], "of_umem", False):
        yield
        return
    _autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        _autograd._push_saved_tensors_default_hooks(*top)


def _aside(hook: Hook) -> Hook:
    """Return the hook, such that the program's modes of torch functions do not see its calls."""

    def aside(saved: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return hook(saved)

    aside.of_umem = True  # type: ignore[attr-defined]
    return aside


def _replace(change: int) -> None:
    global _active
    with _lock:
        _active += change
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
