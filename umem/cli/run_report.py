"""``umem run --report``: run the program with a trace, and write a page about it afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from ..base.paths import can_hold
from ..base.units import format_bytes
from ..config import settings
from ..errors import ConfigError, UmemError
from . import report

_MOST = 256 << 20  # bytes of a trace: reading more would take minutes
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def check(page: Path, given: Mapping[str, str]) -> None:
    """Check early that a page can be made.

    Raises:
        ConfigError: the page cannot be written there, or a trace is requested too.
    """
    from ..report import page as pages

    pages.check(page, "--report")
    options = settings.load(given, flags=True)
    if options.trace is not None:
        raise ConfigError(
            f"--report and {options.origins['trace']} are both given; allowed: one of them. A "
            "trace's page is written by `umem report TRACE`"
        )


def run(
    command: Sequence[str],
    environment: dict[str, str],
    page: Path,
    given: Mapping[str, str],
    program: Sequence[str],
) -> int:
    """Run the program, write the page, and return the program's exit code.

    Without a page the code is 1 if the program's is 0; the reason goes to stderr.

    Args:
        command: what to execute.
        environment: its variables.
        page: the page to write.
        given: the options of the command line.
        program: the program as it was typed, which is the page's title.

    Raises:
        ConfigError: the system cannot execute the command, or the trace cannot be written.
    """
    with _folder_for(page) as folder:
        trace = Path(folder, "trace.jsonl.gz")
        recorded = {"UMEM_TRACE": str(trace.absolute()), settings.TRACE_MOST: str(_MOST)}
        code = _program(command, {**environment, **recorded})
        ended = f"exit code {code}" if code >= 0 else _signal(-code)
        if code:
            print(f"umem run: the program ended with {ended}", file=sys.stderr)
        try:
            _write(page, trace, program, given)
        except UmemError as error:
            print(f"umem run: no report: {error}", file=sys.stderr)
            return _exit_code(code) or 1
        full = any(each.stat().st_size >= _MOST for each in trace.parent.iterdir())
    of = " of the last whole step" if code else ""
    if full:
        of = f" of the last step in the first {format_bytes(_MOST)} of the trace"
    print(f"umem run: report{of}: {page}", file=sys.stderr)
    return _exit_code(code)


def _folder_for(page: Path) -> tempfile.TemporaryDirectory[str]:
    """Make the trace's folder: beside the page, as that for temporary files may be in RAM."""
    place = page.parent if can_hold(page.parent) else None
    try:
        return tempfile.TemporaryDirectory(prefix=".umem-report-", dir=place)
    except OSError as error:
        raise ConfigError(
            f"--report {page}: the trace cannot be written there: {error.strerror}; name another "
            "folder"
        ) from None


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time ones have no name
        return f"signal {number}"


@contextlib.contextmanager
def starting(command: Sequence[str]) -> Iterator[None]:
    """Explain why the system cannot execute the command.

    Raises:
        ConfigError: instead of the system's error.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{command[0]}: cannot be executed: {error.strerror}; a script's first line must name "
            "an interpreter that exists, without a carriage return at its end, and a binary must "
            "be whole and of this machine's architecture"
        ) from None


def _exit_code(code: int) -> int:
    """Return the exit code as a shell reports it; that of a signal is negative here."""
    return code if code >= 0 else 128 - code


def _program(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run the program as a child that receives this process's signals; return its exit code."""
    with starting(command):
        # Descriptors from outside, such as that of a shell's `<(...)`, are the program's.
        child = subprocess.Popen(command, env=environment, close_fds=False)

    def hand_on(number: int, _frame: object) -> None:
        # A terminal sends Ctrl-C to both: the child decides.
        if number != signal.SIGINT or not _is_of_a_terminal():
            child.send_signal(number)

    with child, handling(_FORWARDED, hand_on):
        return child.wait()


@contextlib.contextmanager
def handling(
    numbers: Sequence[signal.Signals], handler: Callable[[int, object], None] | signal.Handlers
) -> Iterator[None]:
    """Give signals another handler within the context."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, other in before.items():
            signal.signal(number, other)


def _is_of_a_terminal() -> bool:
    """Return whether a terminal sends its signals to this process."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _write(page: Path, trace: Path, program: Sequence[str], given: Mapping[str, str]) -> None:
    from ..report import page as pages
    from ..trace.reader import read

    traces = sorted(trace.parent.glob("trace*.jsonl.gz"))  # one per rank, in order
    if not traces:
        raise ConfigError(
            "the program recorded no trace: it ended before `import torch`, which starts umem"
        )
    limits = cast("dict[str, int] | None", read(traces[0], partial=True)[0].extra)
    if limits is None:
        raise ConfigError("the program recorded no trace: it allocated nothing in umem's memory")
    content = report.of_trace(
        traces[0],
        limits["budget"],  # in bytes, also if the option was `auto`
        str(settings.load(given, flags=True).policy),  # text, like all options from outside
        title=" ".join(program),
        host_budget=limits["host_budget"],
        partial=True,
        show=True,
    )
    pages.write(page, [content])
