"""A summary in a notebook, redrawn while other cells run."""

from __future__ import annotations

import threading
from typing import Any

from ..base import extras
from ..errors import ConfigError
from .session import summary

_MIN_S, _MAX_S = 0.1, 3600.0


class LiveView:
    """A table under the notebook's cell, redrawn by a thread until `stop`.

    As a context manager, it stops when the block ends.
    """

    def __init__(self, seconds: float) -> None:
        display = extras.load("IPython.display", "umem.watch", "ipython")
        ipython = extras.load("IPython", "umem.watch", "ipython")
        handle = display.display(summary(), display_id=True)
        # Only a notebook's shell has a kernel. Elsewhere each update would print another table.
        self._handle: Any = handle if getattr(ipython.get_ipython(), "kernel", None) else None
        if self._handle is None:
            return
        self._seconds = seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="umem-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Draw the figures a last time and stop; a no-op if it has stopped already."""
        if self._handle is None or self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join()
        self._handle.update(summary())

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _redraw(self) -> None:
        while not self._stopped.wait(self._seconds):
            self._handle.update(summary())


def watch(seconds: float = 1.0) -> LiveView:
    """Show `umem.summary()` under a notebook's cell, and redraw it while this and other cells run.

    Args:
        seconds: the time between two redraws, from 0.1 to 3600.

    Raises:
        ConfigError: `seconds` is out of range.
        NotSupportedError: IPython is not installed.
    """
    if not _MIN_S <= seconds <= _MAX_S:
        raise ConfigError(f"umem.watch({seconds}): allowed: seconds from {_MIN_S} to {_MAX_S:g}")
    return LiveView(seconds)
