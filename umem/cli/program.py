"""The program of a command that runs it without data: a function of the user's, or a script."""

from __future__ import annotations

import argparse

from ..errors import ConfigError, NotSupportedError

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
