"""What an integration puts into torch, and takes out again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Attached:
    """How torch gets its memory from umem."""

    device: str  # "soft" or "cuda"
    kind: str
    why: str  # completes the sentence "kind: ..."
    pool: Any = None  # the torch.cuda.MemPool, where torch asks umem inside of it only


class Part(Protocol):
    """Something in torch that umem put there."""

    def remove(self) -> None:
        """Take it out; an error leaves it in."""


class Parts:
    """The parts of one integration, taken out in the reverse order of their coming."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._parts: list[Part] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, part: Part) -> None:
        """Keep what was put into torch."""
        with self._lock:
            self._parts.append(part)

    def replace(self, put: Callable[[], None]) -> None:
        """Take all out, and call `put`, which adds; on an error of its nothing stays."""
        with self._lock:
            self.remove()
            try:
                put()
            except BaseException:
                self.remove()
                raise

    def remove(self) -> None:
        """Take all out; none there: nothing."""
        with self._lock:
            while self._parts:
                self._parts[-1].remove()  # where it cannot be removed now, it stays in the list
                self._parts.pop()
