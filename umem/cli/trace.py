"""``umem trace ...``: look at traces and convert them. One module a subcommand."""

from __future__ import annotations

import argparse

from . import trace_convert, trace_info, trace_record
from .base import Command, Subparsers

_SUBCOMMANDS: dict[str, Command] = {
    "info": trace_info,
    "convert": trace_convert,
    "record": trace_record,
}


def add_parser(subparsers: Subparsers) -> None:
    """Add `umem trace`."""
    parser = subparsers.add_parser(
        "trace",
        help="look at a trace of a program's memory, or convert it",
        description="Work with traces: what a program allocates, reads, writes and frees.",
    )
    parts = parser.add_subparsers(dest="trace_command", required=True, metavar="SUBCOMMAND")
    for command in _SUBCOMMANDS.values():
        command.add_parser(parts)


def main(args: argparse.Namespace) -> int:
    """Run the subcommand; returns its exit code."""
    return _SUBCOMMANDS[args.trace_command].main(args)
