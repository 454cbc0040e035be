"""The command line: ``umem COMMAND ...``. One module a command; see base.Command."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import cast

from .. import __version__
from ..errors import UmemError
from ..values import did_you_mean
from .base import Command

COMMANDS = ("run", "plan", "estimate", "advise", "doctor", "demo", "replay", "trace", "top")


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code, 2 for errors of the user or the machine."""
    argv = sys.argv[1:] if argv is None else argv
    named = [argv[0]] if argv and argv[0] in COMMANDS else list(COMMANDS)
    commands = {name: _load(name) for name in named}
    parser = _parser(commands)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        print(_unexpected(unknown[0], _innermost(parser, args)), file=sys.stderr)
        return 2
    try:
        return commands[args.command].main(args)
    except UmemError as error:
        print(f"umem {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _unexpected(word: str, parser: argparse.ArgumentParser) -> str:
    # Argparse has no public list of them.
    hint = did_you_mean(word.partition("=")[0], list(parser._option_string_actions))
    return f"{parser.prog}: unexpected {word!r}{hint}; `{parser.prog} --help` says what is allowed"


def _innermost(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> argparse.ArgumentParser:
    """The parser of the command, or of the command's command, that was given."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return _innermost(action.choices[getattr(args, action.dest)], args)
    return parser


def _load(name: str) -> Command:
    return cast("Command", importlib.import_module(f"{__name__}.{name}"))


def _parser(commands: dict[str, Command]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="umem", description="Train with more memory than the device has."
    )
    parser.add_argument("--version", action="version", version=f"umem {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in commands.values():
        command.add_parser(subparsers)
    return parser
