"""The largest batch that fits, predicted from the memory of two batches.

Memory is modelled as a constant plus an amount per sample, M(b) = m0 + b * m1. The line through two
totals is wrong where page rounding dominates small tensors, and where the peak moves to another op.
A line for each tensor (`TensorLines`) avoids both: it gives the step at any batch, rounded to pages
as the device does it. Either prediction is verified, and corrected where it is wrong. Batches above
256 are found to within 1/256.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from ..base.units import format_bytes
from ..errors import PlanError
from ..trace.step_part import on_device
from ..trace.step_trace import Ints, StepTrace

BATCHES = (8, 16)  # the lines go through these; a batch of 1 would squeeze dimensions away
MOST = 1 << 20  # the largest batch that is tried
_LINES = 6  # guesses from a line before the search bisects
_EXACT = 256  # the largest batch that is found to the last sample
_UNUSED = "does the program use its batch?"
_FLAT = 1 << 12  # memory must have grown at this batch


class Model(Protocol):
    """A prediction of the memory that any batch takes."""

    def at(self, batch: int) -> float:
        """Return the bytes at this batch."""

    def largest(self, budget: int) -> int:
        """Return the largest batch, from 0 to MOST, whose memory is at most `budget` bytes."""


class Line(NamedTuple):
    """memory = fixed + batch * sample, in bytes."""

    fixed: float
    sample: float

    def at(self, batch: int) -> float:
        """Return the bytes at this batch."""
        return self.fixed + batch * self.sample

    def largest(self, budget: int) -> int:
        """Return the largest batch, from 0 to MOST, whose memory is at most `budget` bytes."""
        return int(max(0, min((budget - self.fixed) // self.sample, MOST)))


class Sized(Protocol):
    """A step at one batch."""

    @property
    def step(self) -> StepTrace:
        """The step."""

    @property
    def asked(self) -> Ints:
        """[m] Requested bytes of each tensor."""


class TensorLines:
    """A line for the bytes of each tensor of a step, through two batches."""

    def __init__(self, steps: Mapping[int, Sized], resident: Callable[[StepTrace], int]) -> None:
        """Draw the lines.

        Args:
            steps: two steps by their batch, which are equal except for sizes.
            resident: returns the bytes that a step takes if nothing moves.
        """
        (batch, one), (other, more) = steps.items()
        self._step = one.step
        self._sample = (more.asked - one.asked) / (other - batch)  # [m]
        self._fixed = one.asked - batch * self._sample
        self._resident = resident

    def step(self, batch: int) -> StepTrace:
        """Return the step at this batch."""
        asked = np.rint(self._fixed + batch * self._sample).astype(np.int64)
        taken, large = on_device(np.maximum(asked, 0))
        return replace(self._step, bytes=taken, large=large)

    def at(self, batch: int) -> int:
        """Return the bytes at this batch."""
        return self._resident(self.step(batch))

    def largest(self, budget: int) -> int:
        """Return the largest batch, from 0 to MOST, whose memory is at most `budget` bytes.

        Raises:
            PlanError: no tensor grows with the batch.
        """
        if not self._sample.any():
            raise PlanError(f"no tensor of the step grows with the batch; {_UNUSED}")
        # A step takes at least its peak, which is cheap to compute.
        most = _largest(lambda batch: self.step(batch).peak_bytes, budget, MOST)
        return _largest(self.at, budget, most)


def _largest(need: Callable[[int], int], budget: int, most: int) -> int:
    low, high = 0, most + 1
    while high - low > 1:
        middle = high - 1 if high > most else (low + high) // 2  # most is a likely answer
        low, high = (middle, high) if need(middle) <= budget else (low, middle)
    return low


def alike(one: StepTrace, other: StepTrace) -> bool:
    """Return whether two steps are equal except for sizes and times."""
    columns = ("kind", "first", "last", "access_start", "access_tensor")
    return one.op_names == other.op_names and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in columns
    )


def tensor_lines(
    at: Callable[[int], Sized], batches: tuple[int, int], resident: Callable[[StepTrace], int]
) -> TensorLines | None:
    """Return the lines through the steps at two batches; None if they differ in more than sizes."""
    steps = {batch: at(batch) for batch in batches}
    one, other = (found.step for found in steps.values())
    return TensorLines(steps, resident) if alike(one, other) else None


@dataclass(frozen=True)
class Fit:
    """The result of a search for the largest batch."""

    batch: int  # the largest that fits, to within 1/256; 0: none does
    predicted: int  # the largest, predicted from the first two batches
    modelled: bool  # predicted by the caller's model rather than by the line through two totals
    sample: float  # bytes per additional sample at the prediction
    needs: dict[int, int]  # bytes of each batch that was measured, ascending by batch


def line(first: tuple[int, int], second: tuple[int, int]) -> Line:
    """Return the line through two points (batch, bytes).

    Raises:
        PlanError: the batches are equal, or the larger does not need more.
    """
    (batch, size), (other, other_size) = sorted((first, second))
    if other == batch or other_size <= size:
        raise PlanError(
            f"a batch of {other} needs {format_bytes(other_size)}, one of {batch} "
            f"{format_bytes(size)}: memory does not grow with the batch; {_UNUSED}"
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
    """Predict the largest batch within `budget` from two batches; verify and correct it.

    `batch + 1 + batch // 256` does not fit, unless that is above MOST.

    Args:
        need: returns the bytes that a batch takes, which must not fall as the batch grows. Called
            once per batch. It may raise PlanError for a batch of 1, as batch normalization does.
        budget: in bytes.
        batches: the two batches to start with.
        model: returns a model made from these two batches. None: the line through their totals is
            used; while these are equal, the larger batch is doubled.

    Raises:
        PlanError: memory does not grow with the batch, or `need` raises it above 1.
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
    """Return the largest batch that fits, starting at `guess`; add measurements to `known`."""
    low = max((batch for batch, size in known.items() if size <= budget), default=0)
    high = min((batch for batch, size in known.items() if size > budget), default=MOST + 1)
    tries, next_one, refused = 0, False, 0
    while high - low > (apart := 1 + low // _EXACT):
        guess = min(max(guess, low + apart), high - 1)
        tries += 1
        try:
            known[guess] = need(guess)
        except PlanError:
            if guess > 1:
                raise
            refused = low = 1  # more may run, and fit
            guess = (low + high) // 2
            continue
        if known[guess] <= budget:
            low, next_one = guess, not next_one
        else:
            high, next_one = guess, False
        if next_one:  # the guess fits, and is most likely the largest
            guess = low
        elif tries >= _LINES:
            guess = (low + high) // 2 if high <= MOST else 2 * low
        elif model is not None:  # shifted by its error at the last guess
            guess = model.largest(int(budget - known[guess] + model.at(guess)))
        else:
            guess = _by_line(known, budget)
    return low if low > refused else 0


def _by_line(known: dict[int, int], budget: int) -> int:
    """Return the next guess, from the two batches whose memory is nearest to the budget."""
    nearest = sorted(known.items(), key=lambda item: abs(item[1] - budget))[:2]
    (batch, size), (other, other_size) = sorted(nearest)
    if other_size <= size:  # the peak is in a part that does not depend on the batch
        return 2 * other
    return line((batch, size), (other, other_size)).largest(budget)
