"""Locks that are free in a forked child, where no other thread is left to release them."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_all: weakref.WeakSet[Any] = weakref.WeakSet()


def reentrant() -> threading.RLock:
    """Return a reentrant lock; a child keeps only one that the forking thread had."""
    made = threading.RLock()
    _all.add(made)
    return made


def _renew() -> None:
    for lock in list(_all):
        if not lock._is_owned():
            lock._at_fork_reinit()  # as Python's own modules do


os.register_at_fork(after_in_child=_renew)
