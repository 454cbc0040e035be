"""Progress of long work on a terminal, with the time left; nothing elsewhere."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, TypeVar

_T = TypeVar("_T")
Advance = Callable[[float], None]


@contextlib.contextmanager
def progress(
    title: str, total: float, *, quiet: bool = False, between: bool = True
) -> Iterator[Advance]:
    """Give a function to call, from any thread, with the amount of work that was done.

    The bar is on standard error, while that is a terminal, and is gone when the block ends. It
    needs rich; without it, or with `quiet`, nothing is drawn. A terminal that goes away meanwhile
    is no error of the work.

    Args:
        title: what is being done.
        total: all work, in any unit.
        quiet: draw nothing.
        between: also draw between advances, in a thread; False where that would disturb what is
            being measured.
    """
    screen = None if quiet else _screen()
    rich = None if screen is None else _rich()
    if rich is None:
        yield ignore
        return
    bars, console = rich
    columns = (
        bars.TextColumn("{task.description}", markup=False), bars.BarColumn(),
        bars.TaskProgressColumn(), bars.TextColumn("left"), bars.TimeRemainingColumn(),
    )  # fmt: skip
    # Lines that are printed meanwhile go above the bar, by way of its console: not those that a
    # file or a pipe is to get.
    with bars.Progress(
        *columns,
        console=console.Console(file=screen),
        auto_refresh=between,
        transient=True,
        redirect_stdout=_is_terminal(sys.stdout),
    ) as shown:
        task = shown.add_task(title, total=total)
        yield lambda amount: shown.update(task, advance=amount, refresh=not between)


def ignore(_: float) -> None:
    """Take an amount of work that was done, and show nothing."""


class _Screen:
    """A terminal that may go away: what is written from then on is lost, without an error.

    It is written to at once: what Python keeps and cannot write would become the exit code 120.
    """

    def __init__(self, descriptor: int, encoding: str) -> None:
        self._descriptor = descriptor
        self.encoding = encoding

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            os.write(self._descriptor, text.encode(self.encoding, "replace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing is kept."""

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return True


def _screen() -> _Screen | None:
    """Return the terminal at standard error; None if there is none."""
    if not _is_terminal(sys.stderr):
        return None
    try:
        return _Screen(sys.stderr.fileno(), sys.stderr.encoding or "utf-8")
    except (OSError, ValueError):  # it is no file
        return None


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False


def _rich() -> tuple[Any, Any] | None:
    """Return rich's modules of bars and of consoles; None where it is not installed."""
    try:
        return importlib.import_module("rich.progress"), importlib.import_module("rich.console")
    except ImportError:
        return None


def over(items: Iterable[_T], advance: Advance) -> Iterator[_T]:
    """Yield the items; each counts as 1 once the next one is asked for."""
    for item in items:
        yield item
        advance(1)
