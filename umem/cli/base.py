"""What a command's module offers. One module a command, named as the command.

Importing the module must be cheap (no torch, no numpy): the parser of every command is built for
`umem --help`. Heavy imports belong into `main`.
"""

from __future__ import annotations

import argparse
from typing import Protocol, TypeAlias

# As text, because the class is generic for type checkers only.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Command(Protocol):
    """A module under umem/cli that is a command."""

    def add_parser(self, subparsers: Subparsers) -> None:
        """Add the command's parser to `umem`'s."""

    def main(self, args: argparse.Namespace) -> int:
        """Run it; returns the exit code. A `UmemError` becomes one line on stderr and exit 2."""
