"""``umem trace convert``: convert between trace formats."""

from __future__ import annotations

import argparse

from ..errors import ConfigError
from .base import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add `umem trace convert`."""
    parser = subparsers.add_parser(
        "convert",
        help="convert a trace to another format",
        description="Convert IN to the format of OUT: .jsonl or .jsonl.gz (a trace), .json (Chrome "
        "trace JSON for ui.perfetto.dev) or .pickle (a snapshot for pytorch.org/memory_viz). "
        "Several traces, such as those of all ranks, become one .json.",
    )
    parser.add_argument(
        "sources",
        metavar="IN",
        nargs="+",
        help="a trace, or a pickled torch.cuda.memory._snapshot()",
    )
    parser.add_argument("target", metavar="OUT", help="replaced if it exists")
    parser.add_argument("--step", choices=("last",), help="convert only the last complete step")
    parser.add_argument(
        "--partial",
        action="store_true",
        help="accept a truncated trace, as a killed program leaves it: keep its complete lines",
    )
    parser.add_argument("--gpu", type=int, metavar="N", help="the device to take from a snapshot")


def main(args: argparse.Namespace) -> int:
    """Convert; return the exit code.

    Raises:
        ConfigError: --gpu, which is for one memory snapshot, with several traces.
        TraceError: IN is malformed, or OUT cannot be written.
    """
    from ..trace.convert import convert, merge

    last_step = args.step == "last"
    if len(args.sources) > 1:
        if args.gpu is not None:
            raise ConfigError("--gpu is for one memory snapshot, not for several traces")
        merge(args.sources, args.target, last_step=last_step, partial=args.partial)
        return 0
    (source,) = args.sources
    convert(source, args.target, last_step=last_step, gpu=args.gpu, partial=args.partial)
    return 0
