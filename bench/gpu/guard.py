"""The one door to managed memory: nothing passes beyond a limit far below what the card has free.

Real oversubscription can hang a GPU for everybody who uses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from umem.base.units import GIB, PAGE_BYTES, format_bytes

SHARE = 4  # of the free memory, one part in so many
MOST = 32 * GIB


class GuardError(RuntimeError):
    """An allocation of managed memory was refused."""


def limit_bytes(free: int) -> int:
    """Return the max managed bytes at a time, in whole pages, with `free` bytes free."""
    return min(free // SHARE, MOST) // PAGE_BYTES * PAGE_BYTES


class Guard:
    """Counts managed bytes and refuses what would exceed the limit."""

    def __init__(self, limit: int) -> None:
        if limit <= 0:
            raise ValueError(f"limit {limit}: allowed: above 0 bytes")
        self.limit = limit
        self.held = 0
        self.peak = 0

    @property
    def room(self) -> int:
        """Bytes that may still be reserved."""
        return self.limit - self.held

    def reserve(self, nbytes: int, what: str) -> None:
        """Ask before allocating.

        Raises:
            GuardError: it does not fit below the limit; nothing is reserved.
        """
        if nbytes <= 0:
            raise GuardError(f"{what}: {nbytes} bytes; allowed: above 0")
        if nbytes > self.room:
            raise GuardError(
                f"{what} needs {format_bytes(nbytes)} of managed memory; {format_bytes(self.held)} "
                f"of the allowed {format_bytes(self.limit)} are in use: make it smaller, or run on "
                "a device with more free memory"
            )
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def release(self, nbytes: int) -> None:
        """After freeing what was reserved."""
        assert 0 < nbytes <= self.held, (nbytes, self.held)
        self.held -= nbytes

    @contextlib.contextmanager
    def share(self, nbytes: int, what: str) -> Iterator[int]:
        """Reserve for the length of a block."""
        self.reserve(nbytes, what)
        try:
            yield nbytes
        finally:
            self.release(nbytes)
