"""The order of an optimizer's operations: none begins in the middle of another one.

A signal handler, a destructor or a hook can call a method of the optimizer at any line of its step.
Such a call cannot wait for the step, as it runs on the step's thread, so it is refused before it
changes anything. Other threads wait.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from ...errors import StateError
from .parts import OfOptimizer

_ZERO_GRAD = "zero_grad"
_POLL_S = 0.001
_PATIENCE_S = 60.0  # the thread in the step may wait for something that this one has


class Turn(OfOptimizer):
    """The operation of one optimizer that is under way."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.acts = False  # umem updates parameters itself in the step that runs
        self._lock = threading.RLock()
        self._taken = False

    @contextlib.contextmanager
    def take(self, what: str) -> Iterator[None]:
        """Run the operation `what` within; nothing else of the optimizer begins meanwhile.

        Raises:
            StateError: this thread is in the middle of another one.
        """
        with self._lock:
            self.check(what)
            self._taken = True
            try:
                yield
            finally:
                self._taken = False

    def check(self, what: str) -> None:
        """Refuse the call `what` if this thread is in the middle of an operation.

        Raises:
            StateError: it is.
        """
        with self._lock:
            if self._taken:
                raise self.refusal(what)

    def await_steps(self, what: str, own: int = 0) -> None:
        """Wait until no other thread is inside of a step in which umem updates parameters.

        Args:
            what: the call that asks.
            own: the steps that this thread may be in.

        Raises:
            StateError: this thread is inside of an operation already, or another one remains in
                its step.
        """
        end = time.monotonic() + _PATIENCE_S
        self.check(what)
        while self.acts:
            steps = _steps_of(self._optimizer)
            if steps.pop(threading.get_ident(), 0) > own:
                raise self.refusal(what)
            if not steps:
                return
            if time.monotonic() > end:
                raise StateError(
                    f"{what} has waited {_PATIENCE_S:.0f} s for the optimizer's step on another "
                    "thread; nothing was changed. Call it where the step does not wait for it"
                )
            time.sleep(_POLL_S)

    def refusal(self, what: str) -> StateError:
        """Return the error for the call `what`."""
        name = type(self._optimizer).__name__
        return StateError(
            f"{what} was called in the middle of an operation of the same {name}, as by a signal "
            "handler or a hook; nothing was changed. Let the handler set a flag, and call it "
            "between two steps"
        )


def _steps_of(optimizer: Optimizer) -> dict[int, int]:
    """Return the number of its steps that each thread is in."""
    code = getattr(type(optimizer).step, "__code__", None)
    found: dict[int, int] = {}
    frames: dict[int, FrameType | None] = {**sys._current_frames()}
    while frames:  # emptied: a frame that holds itself would keep all below alive
        thread, frame = frames.popitem()
        count = 0
        while frame is not None:
            if frame.f_code is code:
                count += any(held is optimizer for held in frame.f_locals.values())
            frame = frame.f_back
        if count:
            found[thread] = count
    return found


class ZeroGradHook(OfOptimizer):
    """Refuses `zero_grad()` in the middle of a step, which would lose the rest of its updates."""

    id = -1  # torch has no table of such hooks

    def __init__(self, optimizer: Optimizer, check: Callable[[str], None]) -> None:
        super().__init__(optimizer)
        self._before = vars(optimizer).get(_ZERO_GRAD)
        own = self._before or functools.partial(_of_class, self._reference)

        @functools.wraps(type(optimizer).zero_grad)  # the bound method would be a cycle
        def zero_grad(*args: Any, **named: Any) -> None:
            check("zero_grad()")
            own(*args, **named)

        vars(optimizer)[_ZERO_GRAD] = self._now = zero_grad

    def remove(self) -> None:
        """Restore the method, unless the program has replaced it since."""
        optimizer = self._reference()
        if optimizer is None or vars(optimizer).get(_ZERO_GRAD) is not self._now:
            return
        if self._before is None:
            del vars(optimizer)[_ZERO_GRAD]
        else:
            vars(optimizer)[_ZERO_GRAD] = self._before


def _of_class(reference: Callable[[], Optimizer | None], *args: Any, **named: Any) -> None:
    optimizer = reference()
    assert optimizer is not None, "its method was called"
    type(optimizer).zero_grad(optimizer, *args, **named)
