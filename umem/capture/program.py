"""The program that `umem plan` runs: a user's function, found by name, and the step it returns."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from ..base import collector, python_file
from ..base.device_profiles import DeviceProfile
from ..errors import ConfigError, PlanError, did_you_mean, kind_of
from . import fake_cuda, grouping, source_lines
from .gpu import gpu_of
from .recording import Recording
from .scope import Scope
from .tracer import Tracer

FORMS = (
    "a step (a function without arguments), (model, step), or (model, optimizer, batch, loss_fn) "
    "where loss_fn(model, batch) is the loss"
)

STEPS = 2  # the first makes the optimizer's states; the second is the one that repeats


def find(text: str, directory: Path) -> Callable[[], object]:
    """Return the function named by `pkg.mod:name` or `file.py:name`.

    Modules are searched in `directory` first, and files are relative to it. The folder stays on
    `sys.path`, for imports inside of the function.

    Raises:
        ConfigError: the name has another form, or there is no such function.
        PlanError: the module raises.
    """
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name.isidentifier():
        raise ConfigError(
            f"{text!r}; allowed: FILE.py:function or pkg.mod:function, such as "
            "examples/gpt.py:make_step"
        )
    if "/" in module_name and not module_name.endswith(".py"):
        raise ConfigError(f"{text!r} is a path without .py; allowed: {module_name}.py:{name}")
    module = _import(module_name, text, directory)
    function = getattr(module, name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(f"{text!r}: {module_name} has no {name!r}{did_you_mean(name, known)}")
    if not callable(function):
        raise ConfigError(f"{text!r} is {kind_of(function)}; allowed: a function")
    made: Callable[[], object] = function
    return made


def program(make: Callable[[], object], scope: Scope) -> Callable[[], object]:
    """Call `make` and take its result, one of FORMS.

    Raises:
        PlanError: it raises, or returns something else.
    """
    with explained("setting the program up"), without_arguments():
        model, step = parts(make())
        if model is not None:
            scope.adopt(model, model=True)
        return step


def trace(
    make: Callable[[], object],
    steps: int = STEPS,
    recorder: Tracer | None = None,
    whole_lists: bool = False,
    device: DeviceProfile | None = None,
    *,
    apart: bool = False,
) -> Recording:
    """Set up and run a program on fake tensors.

    Args:
        make: returns the program, see `program`. It is called under fake tensors, so
            its tensors take no memory.
        steps: the number of steps to record; later ones are assumed to equal the last.
        recorder: replaces the plain Tracer, to record more than memory.
        whole_lists: ops on lists work on all tensors at once, as without umem.
        device: what the program is told about its GPU is that of this profile.
        apart: refuse parameters that exist outside of the program, which the steps would change.

    Raises:
        PlanError: the program reads data, which fake tensors lack, or does not work on them; the
            message has the line.
    """
    lists = grouping.whole() if whole_lists else contextlib.nullcontext()
    with recording(recorder, device) as tracer, lists:
        tracer.scope.apart = apart
        step = tracer.begin(lambda: program(make, tracer.scope))
        for _ in range(steps):
            with explained("a step"):
                _run(step, tracer)
            tracer.end_step()
        return tracer.finish()


@contextlib.contextmanager
def recording(
    recorder: Tracer | None = None, device: DeviceProfile | None = None
) -> Iterator[Tracer]:
    """Enter a tracer under fake tensors, with torch behaving as on a machine with that GPU."""
    tracer = Tracer() if recorder is None else recorder
    if device is not None:
        tracer.scope.gpu = gpu_of(device)
    # Otherwise blocks in cycles would be freed whenever the collector happens to run.
    with collector.paused(), warnings.catch_warnings():
        # torch's own copy.deepcopy of a tensor asks for it.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        gc.freeze()  # so that the end of each step does not scan older objects
        try:
            with fake_cuda.like_cuda(tracer.scope) as tracer.mode, tracer.scope, tracer:
                yield tracer
        finally:
            tracer._live.clear()
            gc.unfreeze()


def parts(made: object) -> tuple[nn.Module | None, Callable[[], object]]:
    """Return the model, None if unknown, and the step of a program: FORMS.

    Raises:
        PlanError: it is something else.
    """
    match made:
        case (nn.Module() as model, optimizer, batch, loss_fn) if callable(loss_fn):
            return model, _training(model, optimizer, batch, loss_fn)
        case (nn.Module() as model, step) if callable(step):
            return model, step
        case nn.Module():
            pass  # callable, but not without arguments
        case _ if callable(made):
            return None, made
    _close(made)
    raise PlanError(f"the function returned {_shape(made)}; allowed: {FORMS}")


def _run(step: Callable[[], object], tracer: Tracer) -> None:
    returned = step()
    if _close(returned):
        raise PlanError(
            f"the step returned {_shape(returned)}, which has not run; allowed: a function that "
            "trains on one batch before it returns"
        )
    tracer.returned(returned)


def _close(returned: object) -> bool:
    """Close a coroutine, which would warn that it was never awaited, or a generator."""
    if not (inspect.iscoroutine(returned) or inspect.isgenerator(returned)):
        return False
    returned.close()
    return True


@contextlib.contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn an exception of user code, or its end of the process, into an error with its line."""
    try:
        yield
    except PlanError:
        raise
    except (Exception, SystemExit) as error:
        raise PlanError(
            f"{source_lines.of(error) or 'torch'}: {doing} raised {type(error).__name__}: "
            f"{_first_line(error)}"
        ) from error


def _training(
    model: nn.Module, optimizer: Any, batch: object, loss_fn: Callable[..., Any]
) -> Callable[[], object]:
    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_fn(model, batch).backward()
        optimizer.step()

    return step


def _import(name: str, text: str, directory: Path) -> Any:
    file = directory / name if name.endswith(".py") else None
    # A script's own folder is searched first, as Python does, also by what runs later.
    place = str(directory if file is None else file.parent)
    if sys.path[:1] != [place]:
        sys.path.insert(0, place)
    try:
        with without_arguments():
            # Code that is compiled at import time is planned uncompiled.
            return importlib.import_module(name) if file is None else python_file.load(file)
    except FileNotFoundError as error:
        if file is None or os.path.exists(file):
            raise PlanError(f"{text!r}: {name} needs a file: {error}") from error
        raise ConfigError(f"{text!r}: there is no file {file}") from None
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{text!r}: there is no module {error.name!r} in {place}{_shadow(name, directory)}"
            ) from None
        raise PlanError(f"{text!r}: {name} needs {error.name!r}, which is not installed") from error
    except (Exception, SystemExit) as error:
        where = source_lines.of(error)
        raise PlanError(
            f"{where or name}: importing {name} raised {type(error).__name__}: {_first_line(error)}"
        ) from error


@contextlib.contextmanager
def without_arguments() -> Iterator[None]:
    """Hide the command line of `umem` from a program that parses one."""
    argv = sys.argv
    sys.argv = argv[:1]
    try:
        yield
    finally:
        sys.argv = argv


def _shadow(name: str, directory: Path) -> str:
    """Return what to do where the file is there, but a package of the same name came first."""
    file = Path(*name.split(".")).with_suffix(".py")
    if not os.path.isfile(directory / file):
        return ""
    return f": an installed package has the name {name.partition('.')[0]!r}; allowed: {file}:..."


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no message")


def _shape(made: object) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(item).__name__ for item in made)})"
    return kind_of(made)
