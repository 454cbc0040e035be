"""The command line: ``umem COMMAND ...``. One module per command; see base.Command."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from ..base.version import __version__
from ..errors import UmemError, did_you_mean
from .base import Command

COMMANDS = ("run", "plan", "estimate", "lint", "doctor", "demo", "replay", "report", "trace", "top")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code, 2 for errors of the user or the machine.

    A reader of stdout that closes it early, as `head` does, ends the command silently, with the
    exit code that a shell reports for a program ended by SIGPIPE.
    """
    _prepare_streams()
    with contextlib.ExitStack() as until_end:
        try:
            try:
                return _run(argv, until_end)
            finally:  # also after --help: errors of the interpreter's last flush cannot be caught
                sys.stdout.flush()
        except OSError as error:
            if not _is_of_stdout(error):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                return 128 + signal.SIGPIPE
            print(
                f"umem: the output cannot be written: {error.strerror}; send it to a file or a "
                "pipe that has space",
                file=sys.stderr,
            )
            return 2


def _prepare_streams() -> None:
    """Discard output whose stream is closed, such as that of a cron job or a daemon.

    A program that `umem run` starts finds them closed, as it would without umem. Characters that
    the encoding of stdout lacks are replaced, as those of stderr are by Python, unless Python or
    its user chose otherwise: in the C locale, names of files keep their bytes.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    # A caller of `main` may have replaced it.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _is_of_stdout(error: OSError) -> bool:
    """Return whether the error is one of stdout, without output; others are errors like any other.

    Text that could not be written is still buffered, unless it was longer than the buffer. Then
    the kind of the error decides: the errors of other files that commands write name the file.
    """
    try:
        sys.stdout.flush()
    except OSError:
        return True
    if isinstance(error, BrokenPipeError):
        return _nobody_reads_stdout()
    return error.errno in _FULL and error.filename is None


def _nobody_reads_stdout() -> bool:
    poll = select.poll()
    try:
        poll.register(sys.stdout, 0)
    except OSError:  # a caller's object without a descriptor
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


@contextlib.contextmanager
def _answer_alone() -> Iterator[None]:
    """Keep stdout for the answer: other output to its file descriptor is on stderr, for good.

    The program that a command runs may write to the descriptor itself, in a child process or in
    native code, and at exit.
    """
    answer = os.dup(1)
    os.dup2(sys.stderr.fileno(), 1)
    with (
        os.fdopen(answer, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors) as stream,
        contextlib.redirect_stdout(stream),
    ):
        yield


def _run(given: list[str] | None, until_end: contextlib.ExitStack) -> int:
    argv = sys.argv[1:] if given is None else given
    until_end.callback(sys.path.__setitem__, slice(None), sys.path[:])  # a program's folder leaves
    named = [argv[0]] if argv and argv[0] in COMMANDS else list(COMMANDS)
    commands = {name: _load(name) for name in named}
    parser = _parser(commands)
    if not argv:
        _complete(parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        print(_unexpected(unknown[0], _innermost(parser, args)), file=sys.stderr)
        return 2
    # A caller of `main` keeps its stdout.
    if given is None and sys.stdout is sys.__stdout__ and getattr(args, "json", False):
        until_end.enter_context(_answer_alone())
    try:
        return commands[args.command].main(args)
    except UmemError as error:
        print(f"umem {args.command}: {error}", file=sys.stderr)
        return 2
    except FileNotFoundError as error:
        if error.filename is not None:
            raise
        print(f"umem {args.command}: the working directory was deleted; go to another",
              file=sys.stderr)  # fmt: skip
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
