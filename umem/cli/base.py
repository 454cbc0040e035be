"""The interface of a command's module. One module per command, with the command's name.

Importing the module must be cheap (no torch, no numpy): the parser of every command is built for
`umem --help`. Heavy imports belong in `main`.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Protocol, TypeAlias

from ..base import device_profiles, nodes
from ..config.parsers import SHARE_ALLOWED, parse_share
from ..errors import ConfigError

# As text, because the class is generic only for type checkers.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Command(Protocol):
    """A command: a module in umem/cli."""

    def add_parser(self, subparsers: Subparsers) -> None:
        """Add the command's parser to that of `umem`."""

    def main(self, args: argparse.Namespace) -> int:
        """Run the command; return its exit code. A `UmemError` becomes one line and exit code 2."""


def node_of(args: argparse.Namespace) -> nodes.Node:
    """Return the node of `--node`, with the link of `--link`.

    Raises:
        ConfigError: there is no such node, or a device is given in addition to it.
    """
    if args.device is not None or args.profile is not None:
        raise ConfigError("--node has its own device; allowed: --node, --device or --profile")
    node = nodes.find(args.node)
    if args.link is None:
        return node
    return dataclasses.replace(node, device=device_profiles.with_link(node.device, args.link))


def share_of(given: str) -> float | None:
    """Return the share that the option means; None: the planner chooses.

    Raises:
        ConfigError: it is none of `SHARE_ALLOWED`.
    """
    try:
        return parse_share(given).value
    except ValueError as error:
        raise ConfigError(f"--optimizer: {error}; allowed: {SHARE_ALLOWED}") from None
