"""Hooks and allocators that an integration installs in a framework, and removes again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..base import locks


@dataclass(frozen=True)
class Attached:
    """A description of how umem is attached to torch."""

    device: str  # "soft" or "cuda"
    kind: str
    why: str  # the reason for `kind`, as in "kind: why"
    observer: str = "off"  # or "native", which sees every thread, or "python", which sees one
    pool: Any = None  # the torch.cuda.MemPool, where torch uses umem only inside of it


class Removable(Protocol):
    """A part that umem installed in a framework."""

    def remove(self) -> None:
        """Remove the part; on an error it stays installed."""


class Bindings:
    """The installed parts of one integration, removed in reverse order."""

    def __init__(self) -> None:
        self._lock = locks.reentrant()
        self._parts: list[Removable] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, part: Removable) -> None:
        """Add a part that was installed."""
        with self._lock:
            self._parts.append(part)

    def remove_one(self, part: Removable) -> None:
        """Remove one of the parts; on an error it stays."""
        with self._lock:
            part.remove()
            self._parts.remove(part)

    def replace(self, put: Callable[[], None]) -> None:
        """Remove all parts and call `put`, which adds new ones; if it fails, remove those too."""
        with self._lock:
            self.remove()
            try:
                put()
            except BaseException:
                self.remove()
                raise

    def remove(self) -> None:
        """Remove all parts; a no-op if there are none."""
        with self._lock:
            while self._parts:
                self._parts[-1].remove()  # if this raises, the part stays in the list
                self._parts.pop()
