"""The command line: ``umem COMMAND ...``. One module per command; see base.Command."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import signal
import sys
from pathlib import Path
from typing import cast

from ..base.version import __version__
from ..errors import UmemError, did_you_mean
from .base import Command

COMMANDS = ("run", "plan", "estimate", "lint", "doctor", "demo", "replay", "report", "trace", "top")


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code, 2 for errors of the user or the machine.

    A reader of stdout that closes it early, as `head` does, ends the command silently, with the
    exit code that a shell reports for a program ended by SIGPIPE.
    """
    _open_missing_streams()
    try:
        try:
            return _run(argv)
        finally:  # also after --help: errors of the interpreter's last flush cannot be caught
            sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads_stdout():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _open_missing_streams() -> None:
    """Discard output whose stream is closed, such as that of a cron job or a daemon.

    A program that `umem run` starts finds them closed, as it would without umem.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115


def _nobody_reads_stdout() -> bool:
    """Return whether stdout is a closed pipe; other broken pipes are errors like any other."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    named = [argv[0]] if argv and argv[0] in COMMANDS else list(COMMANDS)
    commands = {name: _load(name) for name in named}
    parser = _parser(commands)
    if not argv:
        _complete(parser)
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


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that completes a command line, and end; else return.

    Such a shell passes the line in the environment, and no arguments (docs/install.md).
    """
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser)


def _unexpected(word: str, parser: argparse.ArgumentParser) -> str:
    # Argparse has no public list of the options.
    hint = did_you_mean(word.partition("=")[0], list(parser._option_string_actions))
    return f"{parser.prog}: unexpected {word!r}{hint}; `{parser.prog} --help` lists what is allowed"


def _innermost(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> argparse.ArgumentParser:
    """Return the parser of the given command or subcommand."""
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
