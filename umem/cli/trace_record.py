"""``umem trace record``: run a program under umem and write its trace."""

from __future__ import annotations

import argparse

from ..errors import ConfigError
from . import run
from .base import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add `umem trace record`."""
    parser = subparsers.add_parser(
        "record",
        help="run a program and write its trace",
        description="Run a Python program under umem, like `umem run`, and write its trace.",
        usage="umem trace record -o FILE [options] (script.py | -m module) [args ...]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-o", dest="output", metavar="FILE", required=True, help="a .jsonl or .jsonl.gz file"
    )
    run.add_program(parser)


def main(args: argparse.Namespace) -> int:
    """Replace this process by the program, as `umem run --trace FILE` does.

    Raises:
        ConfigError: a bad file name, or as `umem run`.
    """
    if not args.output.endswith((".jsonl", ".jsonl.gz")):
        raise ConfigError(f"-o {args.output}; allowed: FILE.jsonl or FILE.jsonl.gz")
    if args.trace is not None:
        raise ConfigError(
            f"-o {args.output} and --trace {args.trace} both name the trace; leave --trace out"
        )
    args.trace = args.output
    return run.main(args)
