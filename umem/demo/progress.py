"""Progress of the demo: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from . import chart, data, table
from .runner import DemoRow

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.progress import Progress as RichProgress


class Lines:
    """Progress as one line per run."""

    def __init__(self, stream: TextIO, runs: int) -> None:
        self._stream = stream
        self._runs = runs
        self._run = 0
        self._title = ""

    def begin(self, title: str, steps: int, budget: int | None = None) -> None:  # noqa: ARG002  (the protocol's)
        """Remember the title: the line is written once the run has figures."""
        self._run += 1
        self._title = title

    def step(self, done: int, milliseconds: float, resident: Sequence[int] = ()) -> None:
        """Ignore steps: they would be too many lines."""

    def end(self, row: DemoRow) -> None:
        """Write the run's line."""
        self._write(f"[{self._run}/{self._runs}] {self._title}: {table.brief(row)}")

    def note(self, text: str) -> None:
        """Print a message of the run."""
        self._write(f"    {text}")

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _write(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class Bars:
    """Progress as lines, with one bar below for the running steps and one for all runs."""

    def __init__(self, stream: TextIO, runs: int) -> None:
        """Create the bars; raise NotSupportedError if rich is not installed."""
        console = data.need("rich.console").Console(file=stream)
        self._bars: RichProgress = data.need("rich.progress").Progress(console=console)
        self._budget: int | None = None
        self._resident: list[int] = []
        self._live: Live = data.need("rich.live").Live(
            console=console, transient=True, get_renderable=self._shown, refresh_per_second=8
        )
        self._all = self._bars.add_task("all runs", total=runs)
        self._now = self._bars.add_task("starting", total=1)
        self._title = ""
        self._live.start()

    def begin(self, title: str, steps: int, budget: int | None = None) -> None:
        """Reset the bar of steps, and the picture of memory."""
        self._title = title
        self._budget = budget
        self._resident = []
        self._bars.reset(self._now, total=steps, description=title)

    def step(self, done: int, milliseconds: float, resident: Sequence[int] = ()) -> None:
        """Advance the bar of steps, and draw the memory of the latest samples."""
        self._resident = [*resident]
        text = f"{self._title} ({milliseconds:.0f} ms per step)"
        self._bars.update(self._now, completed=done, description=text)

    def end(self, row: DemoRow) -> None:
        """Write the run's line above the bars."""
        self._bars.advance(self._all)
        self._live.console.print(f"{self._title}: {table.brief(row)}", markup=False)

    def note(self, text: str) -> None:
        """Print a message of the run."""
        self._live.console.print(f"    {text}", markup=False, highlight=False)

    def close(self) -> None:
        """Release the terminal."""
        self._live.stop()

    def _shown(self) -> RenderableType:
        """Return what is below the lines: the memory of the run, and the bars."""
        group, text = data.need("rich.console").Group, data.need("rich.text").Text
        if self._budget is None or not self._resident:
            return group(self._bars)  # type: ignore[no-any-return]
        width = max(20, self._live.console.width - 12)
        lines = chart.lines(self._resident, self._budget, width)
        return group(*(text(line, no_wrap=True) for line in lines), self._bars)  # type: ignore[no-any-return]


def for_stream(stream: TextIO, runs: int) -> Lines | Bars:
    """Return bars for a terminal, lines for a file or a pipe."""
    return Bars(stream, runs) if stream.isatty() else Lines(stream, runs)
