"""Measuring until the rounds or the time are used up."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Deadline:
    """A moment that measurements must not run past."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds until then, 0 once it has passed."""
        return max(self._end - self._clock(), 0.0)

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed."""
        return self.left == 0.0

    def within(self, seconds: float) -> Deadline:
        """Return the earlier of this deadline and one `seconds` from now."""
        return Deadline(min(self.left, seconds), self._clock)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Postpone this deadline by the time of the block, such as the start of a process."""
        begin = self._clock()
        try:
            yield
        finally:
            self._end += self._clock() - begin

    def rounds(self, count: int) -> Iterator[int]:
        """Yield 0, 1, ... up to `count` rounds: at least one, and none that starts too late."""
        for i in range(count):
            if i and self.passed:
                return
            yield i
