"""Planning of a script that does not use umem: it runs until its optimizer has made some steps.

Best effort. Values that the script reads (a loss to print, a branch) are made up: `item()` is 0,
a condition is false. Batches of a DataLoader are loaded as they are and lose their data after it.
A function that returns the step gives a better plan (see `program.FORMS`).
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import runpy
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.optim import Optimizer
from torch.utils import data
from torch.utils._python_dispatch import _disable_current_modes

from ..base.device_profiles import DeviceProfile
from ..base.step_hooks import after_steps
from ..errors import ConfigError, PlanError
from . import cuda_calls
from .dispatch import DispatchMode
from .fake_cuda import replaced
from .program import explained, recording
from .recording import Recording
from .tracer import Tracer, made_up

# The first includes the setup; the third repeats the second.
STEPS = 3

_Iterator = data.dataloader._BaseDataLoaderIter


class _Enough(BaseException):
    """The end of a script that has done its steps."""


def trace(
    path: Path,
    arguments: list[str],
    steps: int = STEPS,
    recorder: Tracer | None = None,
    device: DeviceProfile | None = None,
    *,
    least: int = 0,
) -> Recording:
    """Run a script on fake tensors until its optimizers have stepped `steps` times.

    Args:
        path, arguments: the script and its command line.
        steps: after which the script is stopped; `_Counter` says what one is.
        recorder: replaces the plain Tracer, to record more than memory.
        device: what the script is told about its GPU is that of this profile.
        least: how many steps there have to be, also where optimizers do not step in turn.

    Raises:
        ConfigError: there is no such script.
        PlanError: it ends earlier, or fails; the message has the line.
    """
    if not os.path.isfile(path):
        raise ConfigError(f"there is no script {str(path)!r}; check the path")
    with recording(recorder, device) as tracer, contextlib.ExitStack() as stack:
        tracer.constants = True
        stack.enter_context(_arguments(path, arguments))
        for owner, name, value in (
            *_loaders(tracer.mode),
            *cuda_calls.present(),
            (FakeTensor, "tolist", _zeros),  # torch asks for each number
            (torch.multiprocessing, "spawn", _in_this_process),
        ):
            stack.enter_context(replaced(owner, name, value))
        counter = _Counter(tracer, steps, least)
        stack.enter_context(replaced(Optimizer, "__init__", counter.constructor()))
        stack.callback(after_steps(counter.stepped).remove)
        end = "ended"
        with explained("the script"), contextlib.suppress(_Enough):
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as asked:
                end = "ended" if asked.code in (None, 0) else f"exited with {asked.code!r}"
        if tracer.recording.steps < counter.wanted:
            raise PlanError(
                f"{path}: the script {end} after {tracer.recording.steps} steps of an optimizer; "
                f"planning needs {steps}: give it more data, or write a function that returns its "
                "step (umem plan FILE.py:function)"
            )
        tracer.remark("values that the script reads were made up: a loss is 0, a branch not taken")
        return tracer.finish()


class _Counter:
    """Ends a step once each optimizer that the script has made has stepped.

    If one steps again before that, a step ends with each step of any of them from then on.

    Args:
        tracer: records the script.
        steps: after which the script ends.
        least: steps in any case; without it, one may be enough less.
    """

    def __init__(self, tracer: Tracer, steps: int, least: int) -> None:
        self._tracer, self.wanted, self._least = tracer, steps, least
        self._made = weakref.WeakSet[Optimizer]()
        self._stepped: set[int] = set()  # ids, since the last end of a step
        self._in_turn = True

    def constructor(self) -> Callable[..., None]:
        """Return the constructor of optimizers that notes them here."""
        init = Optimizer.__init__

        def construct(optimizer: Optimizer, *args: Any, **named: Any) -> None:
            init(optimizer, *args, **named)
            self._made.add(optimizer)

        return construct

    def stepped(self, optimizer: Optimizer, *_: object) -> None:
        """Take the end of an optimizer's step."""
        if self._tracer.scope.is_stepping():
            self._made.discard(optimizer)  # inside another's step
            return
        if self._in_turn and id(optimizer) in self._stepped:
            self._in_turn = False
            # This step has the one before in it. At least one without such follows.
            self.wanted = max(self.wanted - 1, self._least, self._tracer.recording.steps + 2)
            self._tracer.remark(
                "its optimizers do not step in turn: a step is what ends with a step of any of them"
            )
        self._stepped.add(id(optimizer))
        if self._in_turn and self._others_follow():
            return
        self._stepped.clear()
        self._tracer.end_step()
        if self._tracer.recording.steps >= self.wanted:
            raise _Enough

    def _others_follow(self) -> bool:
        def left() -> bool:
            return any(id(each) not in self._stepped for each in self._made)

        if left():
            gc.collect()  # one that the script has dropped is a cycle
        return left()


class _MadeUp(DispatchMode):
    """Gives 0 for a number of a fake tensor, in code that is not recorded."""

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            return made_up(args[0])


def _zeros(tensor: torch.Tensor) -> Any:
    with _disable_current_modes():
        return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()


def _in_this_process(
    fn: Callable[..., object], args: tuple[Any, ...] = (), nprocs: int = 1, **_how: object
) -> None:
    """Call the function as the only process that a script spawns: others would really train."""
    if nprocs != 1:
        raise PlanError(
            f"the script spawns {nprocs} processes; allowed: one, as there is one GPU here. Write "
            "a function that returns the step of a rank (umem plan FILE.py:function)"
        )
    fn(0, *args)


@contextlib.contextmanager
def _arguments(path: Path, arguments: list[str]) -> Iterator[None]:
    """Set the command line and the folder of the script within the context."""
    argv, folders = sys.argv, sys.path[:]
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.absolute().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, folders


def _loaders(mode: FakeTensorMode) -> list[tuple[Any, str, Any]]:
    """Return replacements that make a DataLoader load in this process and return fake tensors."""
    init, begin, following = data.DataLoader.__init__, data.DataLoader.__iter__, _Iterator.__next__

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(init).bind_partial(self, *args, **kwargs)
        given.arguments.update(num_workers=0, persistent_workers=False, prefetch_factor=None)
        given.arguments.update(pin_memory=False, multiprocessing_context=None, timeout=0)
        init(*given.args, **given.kwargs)

    def iterate(self: Any) -> Any:
        with _disable_current_modes(), _MadeUp():
            return begin(self)

    def load(self: Any) -> Any:
        with _disable_current_modes(), _MadeUp():
            batch = following(self)
        return torch.utils._pytree.tree_map_only(torch.Tensor, fake, batch)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

    loader = data.DataLoader
    return [(loader, "__init__", construct), (loader, "__iter__", iterate),
            (_Iterator, "__next__", load)]  # fmt: skip
