"""``umem run [options] script.py args...``: run an unchanged program under umem.

The interpreter replaces this process, so process id, signals and exit code are the program's own,
and child processes inherit the options.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

from ..config import settings
from ..config.options import SETTABLE
from ..errors import ConfigError, NotSupportedError
from ..policies import registry
from . import run_report
from .base import Subparsers

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def add_parser(subparsers: Subparsers) -> None:
    """Add `umem run`."""
    parser = subparsers.add_parser(
        "run",
        help="run a Python program under umem",
        description="Run a Python program under umem. Options go before the program.",
        usage="umem run [options] (script.py | -m module | command) [args ...]",
        epilog=f"Policies: {registry.listed(registry.names())}.",
        allow_abbrev=False,
    )
    settings.add_arguments(parser)
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE.html",
        help="after the program has ended, write a page about its last step (umem report); the "
        "program then runs as a child process",
    )
    _add_command(parser)


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add umem's options, and after them the program and its arguments."""
    settings.add_arguments(parser)
    _add_command(parser)


def _add_command(parser: argparse.ArgumentParser) -> None:
    rest = argparse.REMAINDER  # everything after the program's name belongs to the program
    parser.add_argument("-m", dest="module", nargs=rest, help="run a module as python -m does")
    parser.add_argument("script", nargs=rest, help="the program and its arguments")


def main(args: argparse.Namespace) -> int:
    """Replace this process by the program; return only after `--report`.

    Raises:
        ConfigError: a bad option, no such script, or one that the system cannot execute.
        NotSupportedError: umem cannot work here, so the program is not started.
    """
    given = settings.given_arguments(args)
    check_options(given)
    program = _program(args)
    command = _command(program)
    _check_installed()
    report = getattr(args, "report", None)  # `umem trace record` has no such option
    if report is not None:
        run_report.check(report, given)
    environment = settings.run_environment(given)
    for flag in misplaced(program):
        print(
            f"umem run: warning: {flag} after the script name is passed to the script, which does "
            f"not mention it; put umem's options before the script",
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    if report is None:
        # As `subprocess` does for its children: a shell cannot end what it ignores from its start.
        with run_report.starting(command), run_report.handling(_IGNORED_BY_PYTHON, signal.SIG_DFL):
            os.execvpe(command[0], command, environment)
    return run_report.run(command, environment, report, given, program)


def misplaced(program: list[str]) -> list[str]:
    """Return umem's options that follow a script whose text does not mention them."""
    flags = {option.flag for option in SETTABLE}
    given = [flag for word in program[1:] if (flag := word.partition("=")[0]) in flags]
    # A pipe, such as `<(...)` of a shell, cannot be read twice.
    if not given or not os.path.isfile(program[0]):
        return []
    try:
        text = Path(program[0]).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []  # Python will report it
    return [flag for flag in given if flag[2:].replace("-", "_") not in text.replace("-", "_")]


def _check_installed() -> None:
    """Check that umem is installed: torch finds it by its entry point, not by a path."""
    from importlib.metadata import entry_points

    if not entry_points(group="torch.backends", name="umem"):
        raise NotSupportedError(
            "umem is not installed, so torch would not find it in the program; install it with"
            " `pip install .` in its folder, or call umem.enable() in the program"
        )


def check_options(given: dict[str, str]) -> None:
    """Check the options here: errors become one line, not a traceback from `import torch`.

    Without torch the number of threads is unknown; the check assumes one, the minimum.
    """
    from ..session import resolve

    resolve.native_options(settings.load(given, flags=True), threads=1)


def _command(program: list[str]) -> list[str]:
    """Return what to execute: Python with the program, or a command such as torchrun itself."""
    name = program[0]
    if name == "-m" or (_is_there(name) and not _is_native(name)):
        return [*_interpreter(), *program]
    found = str(Path(name).absolute()) if _is_there(name) else shutil.which(name)
    assert found is not None, "_program checked it"
    return [found, *program[1:]]


def _is_there(name: str) -> bool:
    """Return whether the path is a program; a folder with a __main__.py is one for Python."""
    if not os.path.exists(name):
        return False
    return not os.path.isdir(name) or os.path.exists(f"{name}/__main__.py")


def _is_native(name: str) -> bool:
    """Return whether the file is a binary, or a script of another language than Python."""
    path = Path(name)
    if path.suffix == ".py" or not os.path.isfile(name) or not os.access(name, os.X_OK):
        return False
    try:
        with path.open("rb") as file:
            head = file.readline(256)
    except OSError:  # Python could not read it either
        return True
    if head.startswith(b"#!"):
        return not _interpreter_named(os.fsdecode(head)).startswith(("python", "pypy"))
    return head.startswith(b"\x7fELF")


def _interpreter_named(line: str) -> str:
    """Return the name, without its folder, of the interpreter in a script's first line."""
    first, *others = line[2:].split() or [""]
    if Path(first).name == "env":  # its options and variables come first
        first = next((word for word in others if word[0] != "-" and "=" not in word), "")
    return Path(first).name


def _interpreter() -> list[str]:
    if not sys.executable:
        raise NotSupportedError("python does not know its own path; start it by its full path")
    return [sys.executable]


def _program(args: argparse.Namespace) -> list[str]:
    if args.module:
        return ["-m", *args.module, *args.script]  # those after `-mMODULE` are in the second
    if args.module is not None or not args.script:
        raise ConfigError("no program given; write `umem run script.py` or `umem run -m module`")
    script = args.script[1:] if args.script[0] == "--" else args.script
    if not script or not (_is_there(script[0]) or shutil.which(script[0])):
        name = script[0] if script else "--"
        raise ConfigError(
            f"{name!r} is neither a script nor a command, such as torchrun; check the path, or "
            "use -m for a module"
        )
    return list(script)
