"""The program of a command that runs it without data: a function of the user's, or a script."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, NotSupportedError

if TYPE_CHECKING:
    from ..plan.recording import Recording

_EXAMPLE = "examples.gpt:make_step"


def add_arguments(parser: argparse.ArgumentParser, steps: str) -> None:
    """Add what names the program; `steps` of a script's optimizer are run."""
    text = "pkg.mod:function that returns a step (a function without arguments), (model, step), "
    parser.add_argument(
        "program", nargs="?", help=f"{text}or (model, optimizer, batch, loss_fn(model, batch))"
    )
    text = f"run a script for {steps} steps of its optimizer; what follows are its arguments"
    parser.add_argument("--script", nargs=argparse.REMAINDER, metavar="SCRIPT", help=text)


def check(args: argparse.Namespace, command: str, hint: str = "") -> None:
    """Exactly one of them is given.

    Raises:
        ConfigError: none, or both.
    """
    if (args.program is None) == (not args.script):
        raise ConfigError(
            f"give either pkg.mod:function, such as {_EXAMPLE},{hint} or --script train.py; umem "
            f"{command} --help says what the function returns"
        )


def record(args: argparse.Namespace) -> tuple[str, Recording]:
    """Run what the options name, on tensors without data; its name and what it did.

    Raises:
        ConfigError: there is no such function, or script.
        PlanError: it cannot be run so; says where.
        NotSupportedError: torch is missing.
    """
    need_torch()
    from ..plan import entry, tracer

    if args.script:
        from ..plan import script

        return args.script[0], script.trace(Path(args.script[0]), args.script[1:])
    return args.program, tracer.trace(entry.find(args.program, Path.cwd()))


def need_torch() -> None:
    """Such programs run with torch.

    Raises:
        NotSupportedError: it is missing.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise NotSupportedError(
            f"planning runs the program with torch, which cannot be imported ({error}); install "
            "torch, also a build for CPUs will do"
        ) from None
