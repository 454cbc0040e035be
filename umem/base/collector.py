"""Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from . import locks

_lock = locks.reentrant()
_blocks = 0  # running `paused` blocks, on all threads
_was_on = False  # whether the collector was on before the first of them


@contextmanager
def paused() -> Iterator[None]:
    """Turn the collector off until the last such block ends, then restore its state.

    Code that makes millions of lasting objects spends a third of its time in repeated collections
    of all of them. Use it only if the objects form no reference cycles.
    """
    global _blocks, _was_on
    with _lock:
        if _blocks == 0:
            _was_on = gc.isenabled()
        _blocks += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0 and _was_on:
                gc.enable()
