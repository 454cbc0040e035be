"""Modes of torch that see every op, or every call of a torch function, while they are entered."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode


class DispatchMode(TorchDispatchMode):
    """A mode whose `dispatch` gets each op below autograd in place of torch.

    Compiled functions run compiled under it, and their parts are not seen.
    """

    supports_higher_order_operators = True  # torch refuses them otherwise

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: otherwise Dynamo would never compile again what once runs here."""
        return True

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @abstractmethod
    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the overload `func`, or something in its place; return its result."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        return self.dispatch(func, args, kwargs or {})


@contextlib.contextmanager
def entered(mode: DispatchMode) -> Iterator[None]:
    """Enter a mode within, and leave it also if an interrupt comes while torch enters it."""
    depth = torch._C._len_torch_dispatch_stack()
    try:
        with mode:
            yield
    finally:
        while torch._C._len_torch_dispatch_stack() > depth:
            _pop_mode(None)


class FunctionMode(TorchFunctionMode):
    """A mode whose `call` gets each call of a torch function in place of torch."""

    @abstractmethod
    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func`, or something in its place; return its result."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        return self.call(func, args, dict(kwargs or {}))
