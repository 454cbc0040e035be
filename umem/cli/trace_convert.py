"""``umem trace convert``: from one form of a trace to another."""

from __future__ import annotations

import argparse

from .base import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add `umem trace convert`."""
    parser = subparsers.add_parser(
        "convert",
        help="write a trace in another form",
        description="Write IN as what OUT's name ends in: .jsonl or .jsonl.gz, a trace; .json, "
        "Chrome trace JSON for ui.perfetto.dev.",
    )
    parser.add_argument(
        "source", metavar="IN", help="a trace, or a pickled torch.cuda.memory._snapshot()"
    )
    parser.add_argument("target", metavar="OUT", help="replaced where it exists")
    parser.add_argument(
        "--step", choices=("last",), help="only the last complete step, as a trace of its own"
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="of a trace that is cut off, as a killed program leaves it, the whole lines",
    )
    parser.add_argument("--gpu", type=int, metavar="N", help="which device of a snapshot")


def main(args: argparse.Namespace) -> int:
    """Convert; returns the exit code.

    Raises:
        TraceError: IN is malformed, or OUT cannot be written.
    """
    from ..trace.convert import convert

    convert(
        args.source,
        args.target,
        last_step=args.step == "last",
        gpu=args.gpu,
        partial=args.partial,
    )
    return 0
