"""The largest batch that fits: memory is a constant and a part in proportion to the batch.

Where the peak lies in another part of the step for small batches (the optimizer) than for large
ones, that holds only between batches like those it was found by. So a prediction is verified, and
where it is off the line is drawn again through the nearest batches known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import PlanError
from ..units import format_bytes

BATCHES = (8, 16)  # that the line is drawn through: of 1 or 2, pages are too large a part
MOST = 1 << 20  # no batch above it is tried
_LINES = 6  # as many times the line is trusted; then halving
_FLAT = 1 << 12  # the batch by which memory must have grown


class Line(NamedTuple):
    """memory = fixed + batch * sample, in bytes."""

    fixed: float
    sample: float

    def at(self, batch: int) -> float:
        """Bytes at this batch."""
        return self.fixed + batch * self.sample

    def largest(self, budget: int) -> int:
        """The largest batch, of 0 to MOST, whose memory is at most `budget`."""
        return int(max(0, min((budget - self.fixed) // self.sample, MOST)))


@dataclass(frozen=True)
class Fit:
    """What a search found."""

    batch: int  # the largest that fits; 0: none does
    line: Line  # through the first two batches that differ
    predicted: int  # the largest by that line
    needs: dict[int, int]  # bytes of each batch that was looked at, ascending


def line(first: tuple[int, int], second: tuple[int, int]) -> Line:
    """Through two points of (batch, bytes).

    Raises:
        PlanError: the batches are equal, or the larger does not need more.
    """
    (batch, size), (other, other_size) = sorted((first, second))
    if other == batch or other_size <= size:
        raise PlanError(
            f"a batch of {other} needs {format_bytes(other_size)}, one of {batch} "
            f"{format_bytes(size)}: no line of memory over batch; does the program use its batch?"
        )
    sample = (other_size - size) / (other - batch)
    return Line(size - batch * sample, sample)


def largest_batch(
    need: Callable[[int], int], budget: int, batches: tuple[int, int] = BATCHES
) -> Fit:
    """Predict the largest batch within `budget` from two batches, verify it, correct it.

    Args:
        need: the bytes of a batch; does not fall as it grows. It is called once a batch.
        budget: bytes.
        batches: the two that the first line is drawn through; doubled until they differ.

    Raises:
        PlanError: memory does not grow with the batch.
    """
    least, most = sorted(batches)
    known = {least: need(least), most: need(most)}
    while known[most] <= known[least] and most < _FLAT:
        least, most = most, 2 * most
        known[most] = need(most)
    first = line((least, known[least]), (most, known[most]))
    predicted = guess = first.largest(budget)
    low = max((batch for batch, size in known.items() if size <= budget), default=0)
    high = min((batch for batch, size in known.items() if size > budget), default=MOST + 1)
    tries = 0
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        known[guess] = need(guess)
        low, high = (guess, high) if known[guess] <= budget else (low, guess)
        tries += 1
        guess = _next(known, budget, low, high, halve=tries >= _LINES)
    return Fit(low, first, predicted, dict(sorted(known.items())))


def _next(known: dict[int, int], budget: int, low: int, high: int, halve: bool) -> int:
    """By the line through the two batches whose memory is nearest to the budget."""
    nearest = sorted(known.items(), key=lambda item: abs(item[1] - budget))[:2]
    (batch, size), (other, other_size) = sorted(nearest)
    if halve or other_size <= size:  # or the peak is where the batch does not count
        return (low + high) // 2 if high <= MOST else 2 * low
    return line((batch, size), (other, other_size)).largest(budget)
