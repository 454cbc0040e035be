"""Hooks of saved tensors that step aside where a program would notice them.

torch refuses to begin some parts, such as those of torch.func, while any hooks are active. Both
functions that refuse are context managers written in Python. Their code is replaced, as no function
object can be for all callers: Dynamo knows them by identity. Compiled code has its own hooks.

A function with its own backward that saves a parameter would get another tensor back than the one
that it saved, without its attributes, and could not set its gradient. So `apply` is replaced, and
puts hooks only on what else the function saves.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterator
from types import FunctionType
from typing import Any

import torch
import torch._functorch.eager_transforms as transforms

from ...base import locks
from ...capture.op_semantics import tensors

Hook = Callable[[Any], Any]

_autograd: Any = torch._C._autograd
_lock = locks.reentrant()
_active: set[int] = set()  # the contexts in which hooks are active, on all threads


@contextlib.contextmanager
def saved_hooks(pack: Hook, unpack: Hook) -> Iterator[None]:
    """Run `pack` on what autograd saves within, and `unpack` where it is used.

    As in torch.autograd.graph.saved_tensors_hooks. The hooks are not active within parts of torch
    that refuse them.
    """
    ours = _aside(pack), _aside(unpack)
    # Since torch 2.14, selective checkpoints look behind such hooks for those of the program.
    ours[0]._checkpoint_internal = True
    try:  # from before the first change on: an interrupt may come at any line
        _replace(_active.add, id(ours))
        ours[0]._user_hooks = _top()
        _autograd._push_saved_tensors_default_hooks(*ours)
        yield
    finally:
        try:
            _end(ours)
        except BaseException:  # an interrupt, which has left some of it
            _end(ours)
            raise


def _end(ours: tuple[Any, Any]) -> None:
    if _top() == ours:
        _autograd._pop_saved_tensors_default_hooks()
    ours[0]._user_hooks = None
    _replace(_active.discard, id(ours))


@contextlib.contextmanager
def without() -> Iterator[None]:
    """Put umem's hooks away within, where they are the innermost ones."""
    ours = _ours()
    if ours is None:
        yield
        return
    try:
        _autograd._pop_saved_tensors_default_hooks()
        yield
    finally:
        if _top() != ours:
            _autograd._push_saved_tensors_default_hooks(*ours)


def _top() -> tuple[Hook, Hook] | None:
    """Return this thread's innermost hooks."""
    found: tuple[Hook, Hook] | None = _autograd._top_saved_tensors_default_hooks(True)
    return found


def _ours() -> tuple[Hook, Hook] | None:
    """Return this thread's innermost hooks if they are umem's."""
    top = _top()
    return top if top is not None and getattr(top[0], "of_umem", False) else None


def _aside(hook: Hook) -> Any:
    """Return the hook, such that the program's modes of torch functions do not see its calls."""

    def aside(saved: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return hook(saved)

    made: Any = aside
    made.of_umem = True
    return made


def _replace(change: Callable[[int], None], context: int) -> None:
    with _lock:
        change(context)
        for function, own, other in _REPLACED:
            function.__code__ = other if _active else own
        _replace_apply()


def _disabled(error_message: str) -> Generator[None, None, None]:
    # It has torch's names, and not this module's.
    from umem.recompute.executor.saved_hooks import OWN, without

    with without(), OWN[0](error_message):
        yield


def _nested() -> Generator[int, None, None]:
    from umem.recompute.executor.saved_hooks import OWN, without

    with without(), OWN[1]() as level:
        yield level


def _saves_parameter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function with these arguments may save a parameter for its backward."""
    with torch._C.DisableTorchFunction():
        return any(map(_is_parameter, tensors([*args, *kwargs.values()])))


def _is_parameter(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


_FUNCTIONS: tuple[Any, ...] = (
    inspect.unwrap(torch.autograd.graph.disable_saved_tensors_hooks),
    inspect.unwrap(transforms.grad_increment_nesting),
)
# torch's own context managers.
OWN: tuple[Any, ...] = tuple(
    contextlib.contextmanager(FunctionType(each.__code__, each.__globals__)) for each in _FUNCTIONS
)
_own_apply: Any = vars(torch.autograd.Function)["apply"]  # torch's, or the program's


def _replace_apply() -> None:
    global _own_apply
    now: Any = vars(torch.autograd.Function)["apply"]
    if _active and now is not _apply:
        _own_apply, torch.autograd.Function.apply = now, _apply  # type: ignore[method-assign]
    elif not _active and now is _apply:
        torch.autograd.Function.apply = _own_apply  # type: ignore[method-assign]


@classmethod  # type: ignore[misc]
def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    own, ours = _own_apply.__get__(None, cls), _ours()
    if ours is None or not _saves_parameter(args, kwargs):
        return own(*args, **kwargs)
    with without():
        out = own(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        _hook_others(cls, out, *ours)
    return out


def _hook_others(function: Any, out: Any, pack: Hook, unpack: Hook) -> None:
    """Put the hooks on all that a function has saved, except for parameters."""
    if getattr(function, "clear_saved_tensors_on_access", False):
        return  # reading them here would be that access
    nodes = (tensor.grad_fn for tensor in tensors([out]))
    node: Any = next((n for n in nodes if getattr(n, "_forward_cls", None) is function), None)
    if node is None:
        return
    for saved, tensor in zip(node._raw_saved_tensors, node.saved_tensors, strict=True):
        if tensor is not None and not _is_parameter(tensor):
            saved.register_hooks(pack, unpack)


_REPLACED = [
    (function, function.__code__, other.__code__)
    for function, other in zip(_FUNCTIONS, (_disabled, _nested), strict=True)
]
