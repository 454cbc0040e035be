"""``umem trace ...``: inspect and convert traces. One module per subcommand."""

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
        help="record, inspect or convert a trace",
        description="Work with traces: a program's allocations, reads, writes and frees.",
    )
    parts = parser.add_subparsers(dest="trace_command", required=True, metavar="SUBCOMMAND")
    for command in _SUBCOMMANDS.values():
        command.add_parser(parts)


def main(args: argparse.Namespace) -> int:
    """Run the subcommand; return its exit code."""
    return _SUBCOMMANDS[args.trace_command].main(args)
