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
from typing import Any, NamedTuple

import torch
from torch import nn

from ...base import locks
from ...errors import NotSupportedError

# Is called with the program's own forward, bound to the model, and the arguments of a call.
Run = Callable[..., Any]

_lock = locks.reentrant()  # a finalizer may come at any line


class _Runs(dict[int, "_Entry"]):
    """Entries by the model's id. A pickle by value of a class, with its `forward`, has none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()


_runs = _Runs()
_own: dict[type, tuple[Any, Any]] = {}  # what each class had, or None, and what it has instead


class _OfObject:
    """A `forward` that was set on the object itself."""

    def __init__(self, own: Callable[..., Any], run: Run) -> None:
        functools.update_wrapper(self, own)
        self.own = own
        self.run: Run | None = run  # None: restored, but the program has wrapped this since

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (
            self.own(*args, **kwargs) if self.run is None else self.run(self.own, *args, **kwargs)
        )

    def __reduce__(self) -> Any:
        return functools.partial, (self.own,)  # umem may not be there


class _Entry(NamedTuple):
    model: weakref.ref[nn.Module]
    cls: type
    run: Run
    of_object: _OfObject | None


def replace(model: nn.Module, run: Run) -> None:
    """Let `run` run the model's forward until `restore`.

    Raises:
        NotSupportedError: `forward` is no function.
    """
    cls = type(model)
    of_object: _OfObject | None = None
    with _lock:
        changed = cls in _own and vars(cls).get("forward") is _own[cls][1]
        if (own := vars(model).get("forward")) is not None:
            vars(model)["forward"] = of_object = _OfObject(own, run)
        elif not changed:
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
        gone = weakref.ref(model, lambda dead: _forget(key, dead))
        _runs[key] = _Entry(gone, cls, run, of_object)


def run_of(model: object) -> Run | None:
    """Return what runs the model's forward, or None."""
    found = _runs.get(id(model))
    return found.run if found is not None and found.model() is model else None


def restore(model: nn.Module) -> None:
    """Let the model run its own forward."""
    with _lock:
        if run_of(model) is None:
            return
        known, _, _, mine = _runs[id(model)]
        if mine is not None:
            own, mine.run = mine.own, None
            if vars(model).get("forward") is mine:
                vars(model)["forward"] = own
        _forget(id(model), known)


def _forget(key: int, dead: weakref.ref[nn.Module]) -> None:
    with _lock:
        if key not in _runs or _runs[key].model is not dead:
            return
        cls = _runs.pop(key).cls
        if cls not in _own or any(each.cls is cls for each in list(_runs.values())):
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
            if found is not None and found.cls is cls and found.model() is self:
                return found.run(own.__get__(self), *args, **kwargs)
        return own(self, *args, **kwargs)

    # torch.jit compiles the source of `own`, with the names that this function sees.
    made = FunctionType(forward.__code__, own.__globals__, own.__name__, None, forward.__closure__)
    return functools.wraps(own)(made)
