"""The methods `forward` of models, run by others.

A model's class gets a `forward` that asks for each object who runs it. An attribute of the object
would be bound to it: copies, which share attributes, would run the original; a pickle would name
umem; and the model would refer to itself. The signature is that of the program's own `forward`.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ...base import locks
from ...errors import NotSupportedError

# Is called with the program's own forward, bound to the model, and the arguments of a call.
Run = Callable[..., Any]

_lock = locks.reentrant()  # a finalizer may come at any line
_runs: dict[int, tuple[weakref.ref[nn.Module], type, Run]] = {}  # by id, with the class changed
_own: dict[type, tuple[Any, Any]] = {}  # what each class had, or None, and what it has instead


class _OfObject:
    """A `forward` that was set on the object itself."""

    def __init__(self, own: Callable[..., Any], run: Run) -> None:
        self.own, self._run = own, run
        functools.update_wrapper(self, own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.own, *args, **kwargs)

    def __reduce__(self) -> Any:
        return functools.partial, (self.own,)  # umem may not be there


def replace(model: nn.Module, run: Run) -> None:
    """Let `run` run the model's forward until `restore`.

    Raises:
        NotSupportedError: `forward` is no function.
    """
    cls = type(model)
    with _lock:
        if (own := vars(model).get("forward")) is not None:
            vars(model)["forward"] = _OfObject(own, run)
        elif cls not in _own:
            if not isinstance(inspect.getattr_static(cls, "forward", None), FunctionType):
                raise NotSupportedError(
                    f"{cls.__name__}.forward is no function with the model as its first argument; "
                    "optimize a module inside of the model"
                )
            before = vars(cls).get("forward")
            made = _asking(cls, cls.forward)
            cls.forward = made
            _own[cls] = before, made
        key = id(model)
        _runs[key] = weakref.ref(model, lambda dead: _forget(key, dead)), cls, run


def run_of(model: object) -> Run | None:
    """Return what runs the model's forward, or None."""
    found = _runs.get(id(model))
    return found[2] if found is not None and found[0]() is model else None


def restore(model: nn.Module) -> None:
    """Let the model run its own forward."""
    with _lock:
        if run_of(model) is None:
            return
        if isinstance(found := vars(model).get("forward"), _OfObject):
            vars(model)["forward"] = found.own
        _forget(id(model), _runs[id(model)][0])


def _forget(key: int, dead: weakref.ref[nn.Module]) -> None:
    with _lock:
        if key not in _runs or _runs[key][0] is not dead:
            return
        cls = _runs.pop(key)[1]
        if cls not in _own or any(each[1] is cls for each in _runs.values()):
            return
        before, made = _own.pop(cls)
        if vars(cls).get("forward") is not made:
            return  # the program has replaced it since
        if before is None:  # it was inherited
            del cls.forward  # type: ignore[attr-defined]
        else:
            cls.forward = before  # type: ignore[attr-defined]


def _asking(cls: type, own: Any) -> Any:
    """Return a method that runs an object's `run`, or where it has none `own`."""
    is_compiling, runs = torch.compiler.is_compiling, _runs

    # A class of a base that is changed too calls it by super().
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            found = runs.get(id(self))
            if found is not None and found[1] is cls and found[0]() is self:
                return found[2](own.__get__(self), *args, **kwargs)
        return own(self, *args, **kwargs)

    # torch.jit compiles the source of `own`, with the names that this function sees.
    made = FunctionType(forward.__code__, own.__globals__, own.__name__, None, forward.__closure__)
    return functools.wraps(own)(made)
