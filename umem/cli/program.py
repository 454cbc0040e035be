"""The program that a command runs without data: a user's function, or a script."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, NotSupportedError

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile
    from ..capture.recording import Recording

_EXAMPLE = "examples/gpt.py:make_step"


def add_arguments(parser: argparse.ArgumentParser, steps: str) -> None:
    """Add the options that name the program; `steps` steps of a script's optimizer are run."""
    text = (
        "FILE.py:function or pkg.mod:function that returns a step (a function without arguments), "
        "(model, step), or (model, optimizer, batch, loss_fn(model, batch))"
    )
    parser.add_argument("program", nargs="?", help=text)
    text = f"run a script for {steps} steps of its optimizer; its arguments follow"
    parser.add_argument("--script", nargs=argparse.REMAINDER, metavar="SCRIPT", help=text)


def check(args: argparse.Namespace, command: str, hint: str = "") -> None:
    """Check that exactly one of function and script is given.

    Raises:
        ConfigError: none or both are given, or a script is given as a function.
    """
    refuse_script(args, command)
    if (args.program is None) == (not args.script):
        raise ConfigError(
            f"give either FILE.py:function or pkg.mod:function, such as {_EXAMPLE},{hint} or "
            f"--script train.py; umem {command} --help describes what the function returns"
        )


def refuse_script(args: argparse.Namespace, command: str) -> None:
    """Raise ConfigError, before torch is imported, for a script given as a function."""
    if args.program is not None and args.program.endswith(".py"):
        raise ConfigError(
            f"{args.program!r} is a script; write umem {command} --script {args.program}, with its "
            f"arguments after it, or name a function, such as {_EXAMPLE}"
        )


@contextlib.contextmanager
def folder_kept() -> Iterator[int]:
    """Return to the working directory after a program, which may change it; give its descriptor.

    Relative paths of the command line, and lines of the program, depend on it.
    """
    folder = os.open(".", os.O_PATH)  # even one that was deleted, or that cannot be read
    try:
        yield folder
    finally:
        os.fchdir(folder)
        os.close(folder)


@folder_kept()
def record(args: argparse.Namespace, device: DeviceProfile | None = None) -> tuple[str, Recording]:
    """Run the program on tensors without data; return its name and the recording.

    device: what the program is told about its GPU is that of this profile.

    Raises:
        ConfigError: no such function or script.
        PlanError: it cannot be run without data; the message says where.
        NotSupportedError: torch is missing.
    """
    need_torch()
    from ..capture import program

    if args.script:
        from ..capture import script

        return args.script[0], script.trace(Path(args.script[0]), args.script[1:], device=device)
    return args.program, program.trace(program.find(args.program, Path.cwd()), device=device)


def output_aside(json: bool) -> contextlib.AbstractContextManager[object]:
    """Return a context that sends the program's output to stderr if the answer is JSON."""
    return contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext()


def need_torch() -> None:
    """Raise NotSupportedError if torch, which runs such programs, cannot be imported."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise NotSupportedError(
            f"torch, which runs the program, cannot be imported ({error}); install "
            "torch (a CPU build is enough)"
        ) from None
