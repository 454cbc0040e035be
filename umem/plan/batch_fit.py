"""The largest batch that fits, from two batches: memory is a constant and a part by the sample.

The line through two totals, M(b) = m0 + b * m1, is off where pages are a large part of small
tensors, and where the peak moves to another op. A line for each tensor (`TensorLines`) is not: with
it the step of any batch is known, rounded to pages as the device does it. Either is a prediction,
which is verified, and corrected where it is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from ..errors import PlanError
from ..trace.step import Ints, StepTrace
from ..trace.steps import on_device
from ..units import format_bytes

BATCHES = (8, 16)  # that lines are drawn through; of 1, dimensions fall away
MOST = 1 << 20  # no batch above it is tried
_LINES = 6  # as many times a line is trusted; then halving
_UNUSED = "does the program use its batch?"
_FLAT = 1 << 12  # the batch by which memory must have grown


class Model(Protocol):
    """What is thought of the memory of batches that were not looked at."""

    def at(self, batch: int) -> float:
        """Bytes at this batch."""

    def largest(self, budget: int) -> int:
        """The largest batch, of 0 to MOST, whose memory is at most `budget`."""


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


class Sized(NamedTuple):
    """A step at one batch."""

    batch: int
    step: StepTrace
    asked: Ints  # [m] bytes of each tensor as asked for


class TensorLines:
    """A line for the bytes of each tensor of a step, through two batches."""

    def __init__(self, first: Sized, second: Sized, resident: Callable[[StepTrace], int]) -> None:
        """`resident` says what a step takes.

        Raises:
            PlanError: the steps differ in more than sizes.
        """
        if not alike(first.step, second.step):
            raise PlanError(
                f"the steps with batches of {first.batch} and {second.batch} differ in more than "
                "sizes, so no tensor of one is known to be a tensor of the other"
            )
        self._step = first.step
        self._sample = (second.asked - first.asked) / (second.batch - first.batch)  # [m]
        self._fixed = first.asked - first.batch * self._sample
        self._resident = resident

    def step(self, batch: int) -> StepTrace:
        """The step at this batch."""
        asked = np.rint(self._fixed + batch * self._sample).astype(np.int64)
        taken, large = on_device(np.maximum(asked, 0))
        return replace(self._step, bytes=taken, large=large)

    def at(self, batch: int) -> int:
        """Bytes at this batch."""
        return self._resident(self.step(batch))

    def largest(self, budget: int) -> int:
        """The largest batch, of 0 to MOST, whose memory is at most `budget`."""
        if not self._sample.any():
            raise PlanError(f"no tensor of the step grows with the batch; {_UNUSED}")
        # No step takes less than its peak, which is quickly known.
        most = _largest(lambda batch: self.step(batch).peak_bytes, budget, MOST)
        return _largest(self.at, budget, most)


def _largest(need: Callable[[int], int], budget: int, most: int) -> int:
    low, high = 0, most + 1
    while high - low > 1:
        middle = high - 1 if high > most else (low + high) // 2  # the most is likely
        low, high = (middle, high) if need(middle) <= budget else (low, middle)
    return low


def alike(one: StepTrace, other: StepTrace) -> bool:
    """Whether two steps are the same but for sizes and times."""
    columns = ("kind", "first", "last", "access_start", "access_tensor")
    return one.op_names == other.op_names and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in columns
    )


@dataclass(frozen=True)
class Fit:
    """What a search found."""

    batch: int  # the largest that fits; 0: none does
    predicted: int  # the largest by two batches alone
    modelled: bool  # whether the caller's model predicted it, not the line through two totals
    sample: float  # bytes that one sample more takes, where it was predicted
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
            f"{format_bytes(size)}: no line of memory over batch; {_UNUSED}"
        )
    sample = (other_size - size) / (other - batch)
    return Line(size - batch * sample, sample)


def largest_batch(
    need: Callable[[int], int],
    budget: int,
    *,
    batches: tuple[int, int] = BATCHES,
    model: Callable[[int, int], Model | None] = lambda _first, _second: None,
) -> Fit:
    """Predict the largest batch within `budget` from two batches, verify it, correct it.

    Args:
        need: the bytes of a batch; does not fall as it grows. It is called once a batch.
        budget: bytes.
        batches: the two to begin with.
        model: of these, what it thinks of the others; None: the line through their totals, or
            through those of twice the batches, until they differ.

    Raises:
        PlanError: memory does not grow with the batch.
    """
    least, most = sorted(batches)
    known = {least: need(least), most: need(most)}
    given = model(least, most)
    while given is None and known[most] <= known[least] and most < _FLAT:
        least, most = most, 2 * most
        known[most] = need(most)
    used = given or line((least, known[least]), (most, known[most]))
    predicted = used.largest(budget)
    sample = (used.at(2 * predicted) - used.at(predicted)) / predicted if predicted else 0.0
    batch = _verified(need, known, budget, predicted, given)
    return Fit(batch, predicted, given is not None, sample, dict(sorted(known.items())))


def _verified(
    need: Callable[[int], int], known: dict[int, int], budget: int, guess: int, model: Model | None
) -> int:
    """The largest batch that fits, beginning with `guess`; what is looked at becomes `known`."""
    low = max((batch for batch, size in known.items() if size <= budget), default=0)
    high = min((batch for batch, size in known.items() if size > budget), default=MOST + 1)
    tries, next_one = 0, False
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        known[guess] = need(guess)
        tries += 1
        if known[guess] <= budget:
            low, next_one = guess, not next_one
        else:
            high, next_one = guess, False
        if next_one:  # what was predicted fits, and most likely is the largest
            guess = low + 1
        elif tries >= _LINES:
            guess = (low + high) // 2 if high <= MOST else 2 * low
        elif model is not None:  # by what it was off at the last guess
            guess = model.largest(int(budget - known[guess] + model.at(guess)))
        else:
            guess = _by_line(known, budget)
    return low


def _by_line(known: dict[int, int], budget: int) -> int:
    """Through the two batches whose memory is nearest to the budget."""
    nearest = sorted(known.items(), key=lambda item: abs(item[1] - budget))[:2]
    (batch, size), (other, other_size) = sorted(nearest)
    if other_size <= size:  # the peak is where the batch does not count
        return 2 * other
    return line((batch, size), (other, other_size)).largest(budget)
