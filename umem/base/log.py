"""The logger `umem`, through which all messages to the user go."""

from __future__ import annotations

import logging


def set_up(level: str, name: str = "umem") -> None:
    """Let umem's messages from `level` on reach stderr, where the program says nothing else.

    Args:
        name: what each begins with.
    """
    log = logging.getLogger("umem")
    log.setLevel(level.upper())
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"{name}: %(message)s"))
        log.addHandler(handler)
