"""The logger `umem`, through which all messages to the user go."""

from __future__ import annotations

import logging


def set_up(level: str, name: str = "umem") -> None:
    """Write umem's messages of `level` and above to stderr, unless the program has handlers.

    Args:
        level: the minimum severity.
        name: the prefix of each message.
    """
    log = logging.getLogger("umem")
    log.setLevel(level.upper())
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        # A program may configure logging later; each message then comes from its handlers alone.
        handler.addFilter(lambda _: not logging.getLogger().handlers)
        handler.setFormatter(logging.Formatter(f"{name}: %(message)s"))
        log.addHandler(handler)
