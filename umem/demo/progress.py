"""Progress of the demo: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from . import data, table
from .runner import DemoRow

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class Lines:
    """Progress as one line per run."""

    def __init__(self, stream: TextIO, runs: int) -> None:
        self._stream = stream
        self._runs = runs
        self._run = 0
        self._title = ""

    def begin(self, title: str, steps: int) -> None:  # noqa: ARG002  (the protocol's)
        """Remember the title: the line is written once the run has figures."""
        self._run += 1
        self._title = title

    def step(self, done: int, milliseconds: float) -> None:
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
        self._bars: RichProgress = data.need("rich.progress").Progress(
            console=console, transient=True
        )
        self._all = self._bars.add_task("all runs", total=runs)
        self._now = self._bars.add_task("starting", total=1)
        self._title = ""
        self._bars.start()

    def begin(self, title: str, steps: int) -> None:
        """Reset the bar of steps."""
        self._title = title
        self._bars.reset(self._now, total=steps, description=title)

    def step(self, done: int, milliseconds: float) -> None:
        """Advance the bar of steps."""
        text = f"{self._title} ({milliseconds:.0f} ms per step)"
        self._bars.update(self._now, completed=done, description=text)

    def end(self, row: DemoRow) -> None:
        """Write the run's line above the bars."""
        self._bars.advance(self._all)
        self._bars.console.print(f"{self._title}: {table.brief(row)}", markup=False)

    def note(self, text: str) -> None:
        """Print a message of the run."""
        self._bars.console.print(f"    {text}", markup=False, highlight=False)

    def close(self) -> None:
        """Release the terminal."""
        self._bars.stop()


def for_stream(stream: TextIO, runs: int) -> Lines | Bars:
    """Return bars for a terminal, lines for a file or a pipe."""
    return Bars(stream, runs) if stream.isatty() else Lines(stream, runs)
