"""The order of an optimizer's operations: none begins in the middle of another one.

A signal handler, a destructor or a hook can call a method of the optimizer at any line of its step.
Such a call cannot wait for the step, as it runs on the step's thread, so it is refused before it
changes anything. Other threads wait.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from ...base import locks
from ...errors import StateError
from . import arrivals
from .parts import OfOptimizer, hooked_step

_POLL_S = 0.001
_PATIENCE_S = 60.0  # the thread in the step may wait for something that this one has


class Turn(OfOptimizer):
    """The operation of one optimizer that is under way."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.acts = False  # umem updates parameters itself in the step that runs
        self._lock = locks.reentrant()
        self._taken_by = 0  # the thread that has the turn

    @contextlib.contextmanager
    def take(self, what: str) -> Iterator[None]:
        """Run the operation `what` within; nothing else of the optimizer begins meanwhile.

        Raises:
            StateError: this thread is in the middle of another one, or another thread does not
                end its own.
        """
        self.check(what)
        if not self._lock.acquire(timeout=_PATIENCE_S):
            raise self._too_late(what)
        try:
            self.check(what)  # a signal handler may have taken it
            self._taken_by = threading.get_ident()
            yield
        finally:
            self._taken_by = 0
            self._lock.release()

    def check(self, what: str) -> None:
        """Refuse the call `what` if this thread is in the middle of an operation.

        Raises:
            StateError: it is.
        """
        if self._taken_by == threading.get_ident() or arrivals.is_waiting():
            raise self.refusal(what)

    def check_step(self) -> None:
        """Refuse a step within one in which umem updates parameters, or within a checkpoint.

        Raises:
            StateError: this thread is inside of either.
        """
        me = threading.get_ident()
        if (self.acts and self._calls("step").get(me, 0) > 1) or self._in_checkpoint(me):
            raise self.refusal("step()")

    def check_checkpoint(self, what: str) -> None:
        """Refuse a checkpoint within another one or in the middle of a step, and await others'.

        Raises:
            StateError: this thread is inside of either, or another one remains in its step.
        """
        me = threading.get_ident()
        if self._in_checkpoint(me) > 1:
            raise self.refusal(what)
        self.await_steps(what)

    def await_steps(self, what: str, own: int = 0) -> None:
        """Wait until no other thread is inside of a step in which umem updates parameters.

        Args:
            what: the call that asks.
            own: the steps that this thread may be in.

        Raises:
            StateError: this thread is inside of more, or another one remains in its step.
        """
        end = time.monotonic() + _PATIENCE_S
        while self.acts:
            steps = self._calls("step")
            if steps.pop(threading.get_ident(), 0) > own:
                raise self.refusal(what)
            if not steps:
                return
            if time.monotonic() > end:
                raise self._too_late(what)
            time.sleep(_POLL_S)

    def _calls(self, *methods: str) -> dict[int, int]:
        return _calls_of(self._optimizer, methods)

    def _in_checkpoint(self, thread: int) -> int:
        """Return the calls that save or load its states which a thread is in."""
        return self._calls("state_dict", "load_state_dict").get(thread, 0)

    def _too_late(self, what: str) -> StateError:
        return StateError(
            f"{what} has waited {_PATIENCE_S:.0f} s for the optimizer's operation on another "
            "thread; nothing was changed. Call it where that does not wait for this thread"
        )

    def refusal(self, what: str) -> StateError:
        """Return the error for the call `what`."""
        name = type(self._optimizer).__name__
        return StateError(
            f"{what} was called in the middle of an operation of the same {name}, for example by "
            "a signal handler or a hook; nothing was changed. Let the handler set a flag, and call "
            "it between two steps"
        )


def _calls_of(optimizer: Optimizer, methods: Iterable[str]) -> dict[int, int]:
    """Return the number of calls of its methods that each thread is in."""
    cls = type(optimizer)
    codes = {
        (hooked_step(optimizer) if m == "step" else inspect.unwrap(getattr(cls, m))).__code__
        for m in methods
    }
    found: dict[int, int] = {}
    frames: dict[int, FrameType | None] = {**sys._current_frames()}
    while frames:  # emptied: a frame that holds itself would keep all below alive
        thread, frame = frames.popitem()
        count = 0
        while frame is not None:
            if frame.f_code in codes:
                count += any(held is optimizer for held in frame.f_locals.values())
            frame = frame.f_back
        if count:
            found[thread] = count
    return found


class MethodHook(OfOptimizer):
    """A method of one optimizer that is replaced by another until `remove`."""

    def __init__(self, optimizer: Optimizer, name: str, method: Callable[..., Any]) -> None:
        super().__init__(optimizer)
        self._name, self._now = name, method
        self._before = vars(optimizer).get(name)
        vars(optimizer)[name] = method

    def remove(self) -> None:
        """Restore the method, unless the program has replaced it since."""
        optimizer = self._reference()
        if optimizer is None or vars(optimizer).get(self._name) is not self._now:
            return
        if self._before is None:
            del vars(optimizer)[self._name]
        else:
            vars(optimizer)[self._name] = self._before


class FirstHook(MethodHook):
    """Runs `first` before each call of a method."""

    def __init__(self, optimizer: Optimizer, name: str, first: Callable[[], None]) -> None:
        reference = weakref.ref(optimizer)
        own = vars(optimizer).get(name) or functools.partial(_of_class, reference, name)

        @functools.wraps(getattr(type(optimizer), name))  # the bound method would be a cycle
        def method(*args: Any, **named: Any) -> Any:
            first()
            return own(*args, **named)

        signature = inspect.signature(getattr(optimizer, name))
        method.__signature__ = signature  # type: ignore[attr-defined]
        super().__init__(optimizer, name, method)


def _of_class(
    reference: Callable[[], Optimizer | None], name: str, *args: Any, **named: Any
) -> Any:
    optimizer = reference()
    assert optimizer is not None, "its method was called"
    return getattr(type(optimizer), name)(optimizer, *args, **named)
