"""``umem trace record``: run a program under umem and write its trace."""

from __future__ import annotations

import argparse

from . import run
from .base import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add `umem trace record`."""
    parser = subparsers.add_parser(
        "record",
        help="run a program and write its trace",
        description="Run a Python program under umem, as `umem run`, and write its trace.",
        usage="umem trace record -o FILE [options] (script.py | -m module) [args ...]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-o", dest="output", metavar="FILE", required=True, help="a .jsonl or .jsonl.gz file"
    )
    run.add_program(parser)


def main(args: argparse.Namespace) -> int:
    """Replace this process by the program; as `umem run --trace FILE`."""
    args.trace = args.output
    return run.main(args)
