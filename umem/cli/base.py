"""The interface of a command's module. One module per command, with the command's name.

Importing the module must be cheap (no torch, no numpy): the parser of every command is built for
`umem --help`. Heavy imports belong in `main`.
"""

from __future__ import annotations

import argparse
from typing import Protocol, TypeAlias

# As text, because the class is generic only for type checkers.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Command(Protocol):
    """A command: a module in umem/cli."""

    def add_parser(self, subparsers: Subparsers) -> None:
        """Add the command's parser to that of `umem`."""

    def main(self, args: argparse.Namespace) -> int:
        """Run the command; return its exit code. A `UmemError` becomes one line and exit code 2."""
