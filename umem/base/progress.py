"""Progress of long work on a terminal, with the time left; nothing elsewhere."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")
Advance = Callable[[float], None]


@contextlib.contextmanager
def progress(title: str, total: float, *, quiet: bool = False) -> Iterator[Advance]:
    """Give a function to call with the amount of work that was done.

    The bar is on standard error, while that is a terminal, and is gone when the block ends. It
    needs rich; without it, or with `quiet`, nothing is drawn.

    Args:
        title: what is being done.
        total: all work, in any unit.
        quiet: draw nothing.
    """
    rich = None if quiet or sys.stderr is None or not sys.stderr.isatty() else _rich()
    if rich is None:
        yield lambda _: None
        return
    bars, console = rich
    columns = (
        bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TaskProgressColumn(),
        bars.TextColumn("left"), bars.TimeRemainingColumn(),
    )  # fmt: skip
    with bars.Progress(*columns, console=console.Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=total)
        yield lambda amount: shown.advance(task, amount)


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
