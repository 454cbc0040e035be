"""The interface of a command's module. One module per command, with the command's name.

Importing the module must be cheap (no torch, no numpy): the parser of every command is built for
`umem --help`. Heavy imports belong in `main`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from ..base import device_profiles, nodes
from ..base.units import BYTES_ALLOWED, parse_bytes
from ..config.parsers import SHARE_ALLOWED, parse_share
from ..errors import ConfigError, plain
from ..policies import registry

# As text, because the class is generic only for type checkers.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Command(Protocol):
    """A command: a module in umem/cli."""

    def add_parser(self, subparsers: Subparsers) -> None:
        """Add the command's parser to that of `umem`."""

    def main(self, args: argparse.Namespace) -> int:
        """Run the command; return its exit code. A `UmemError` becomes one line and exit code 2."""


def add_device(
    parser: argparse.ArgumentParser, *, of_trace: bool = False, several: bool = False
) -> None:
    """Add --device, --profile and --link, which choose the device of a replay.

    Args:
        parser: gets the options.
        of_trace: the device that the trace names is the default.
        several: --device takes several names.
    """
    default = device_profiles.DEFAULT
    default = f"the trace's device if that has a profile, else {default}" if of_trace else default
    what, nargs = ("device profiles", "+") if several else ("a device profile", None)
    parser.add_argument("--device", nargs=nargs, help=f"{what} (default: {default})")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="a device profile in TOML or JSON"
    )
    text = "link bandwidth instead of the device's, each way or IN,OUT" + (
        ", for every device" if several else ""
    )
    parser.add_argument("--link", type=_link, metavar="GB/s", help=text)


def _link(text: str) -> list[float]:
    """Return GB/s, one number for both directions or two."""
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        rates = []
    if not 1 <= len(rates) <= 2 or not all(0 < rate < math.inf for rate in rates):
        raise argparse.ArgumentTypeError(
            f"{plain(text)}; allowed: GB/s above 0, each way as 25, or in and out as 3.2,4.5"
        )
    return rates


def device_of(args: argparse.Namespace) -> device_profiles.DeviceProfile:
    """Return the device that --device, --profile and --link choose.

    Raises:
        ConfigError: there is no such device, or two are given.
    """
    if args.profile is not None and args.device is not None:
        raise ConfigError("--device and --profile are both given; allowed: one of them")
    profile = (
        device_profiles.load(args.profile)
        if args.profile is not None
        else device_profiles.find(args.device or device_profiles.DEFAULT)
    )
    return profile if args.link is None else device_profiles.with_link(profile, *args.link)


def policies_of(given: Sequence[str], everything: Sequence[str]) -> list[str]:
    """Return the policies that `--policy` names, each once; `all` stands for `everything`.

    Raises:
        ConfigError: there is no such policy.
    """
    chosen = [name for each in given for name in (everything if each == "all" else (each,))]
    for name in given:
        if name != "all":
            registry.make(name)  # before any work
    return list(dict.fromkeys(chosen))


def add_host_budget(parser: argparse.ArgumentParser) -> None:
    """Add --host-budget, which `host_budget_of` reads."""
    text = f"max bytes of evicted tensors: unlimited, or {BYTES_ALLOWED} (default: unlimited)"
    parser.add_argument("--host-budget", default="unlimited", metavar="SIZE", help=text)


def host_budget_of(text: str) -> int:
    """Return the bytes that may be evicted; 0 for no limit.

    Raises:
        ConfigError: neither `unlimited` nor bytes above 0.
    """
    if text.strip().lower() == "unlimited":
        return 0
    try:
        count = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--host-budget: {error}; allowed: unlimited, {BYTES_ALLOWED}") from None
    if count == 0:
        raise ConfigError("--host-budget 0; allowed: unlimited, or bytes above 0")
    return count


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
    return dataclasses.replace(node, device=device_profiles.with_link(node.device, *args.link))


def share_of(given: str) -> float | None:
    """Return the share that the option sets; None: the planner chooses.

    Raises:
        ConfigError: it is none of `SHARE_ALLOWED`.
    """
    try:
        return parse_share(given).value
    except ValueError as error:
        raise ConfigError(f"--optimizer: {error}; allowed: {SHARE_ALLOWED}") from None
