"""Progress bars of long work, with the time left; only on a terminal."""

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
    """Draw a bar during the block; the yielded function adds an amount of work, from any thread.

    The bar is on standard error if that is a terminal, and disappears when the block ends. Without
    the package rich, or with `quiet`, nothing is drawn. A terminal that closes is not an error.

    Args:
        title: the name of the work.
        total: the amount of all work, in any unit.
        quiet: draw nothing.
        between: also draw between advances, in a thread; pass False if the thread would disturb a
            measurement.
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
    # The bar's console prints the program's lines above the bar, except those for a file or pipe.
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
    """Ignore an amount of finished work."""


class _Screen:
    """A terminal that may close; output after that is lost, without an error.

    Output is unbuffered: a buffer that Python cannot flush at exit makes the exit code 120.
    """

    def __init__(self, descriptor: int, encoding: str) -> None:
        self._descriptor = descriptor
        self.encoding = encoding

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            os.write(self._descriptor, text.encode(self.encoding, "replace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing, because there is no buffer."""

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
    except (OSError, ValueError):  # not a file
        return None


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _rich() -> tuple[Any, Any] | None:
    """Return rich's modules `progress` and `console`; None if rich is not installed."""
    try:
        return importlib.import_module("rich.progress"), importlib.import_module("rich.console")
    except ImportError:
        return None


def over(items: Iterable[_T], advance: Advance) -> Iterator[_T]:
    """Yield the items; each counts as 1 when the next one is requested."""
    for item in items:
        yield item
        advance(1)
