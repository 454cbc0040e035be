"""Tensors of one value each, with the value that they must have kept on the host's side."""

from __future__ import annotations

import itertools

import torch

_values = itertools.count(1)  # unique: a tensor that shows another one's value is seen


class Cell:
    """A device tensor that holds one value throughout, and the values that it may hold.

    Several if a write failed: it happened or it did not. None before the first write.
    """

    def __init__(self, nbytes: int, device: str = "cuda") -> None:
        self.tensor = torch.empty(nbytes // 4, dtype=torch.int32, device=device)
        self.values: frozenset[int] | None = None

    def fill(self) -> None:
        """Writes a value that no other cell has, on the current stream."""
        value = next(_values)
        before = self._expect(frozenset([value]))
        self.tensor.fill_(value)
        self.values = before

    def copy(self, source: Cell) -> None:
        """Takes the source's value over, on the current stream."""
        before = self._expect(source.values)
        self.tensor.copy_(source.tensor, non_blocking=True)
        self.values = before

    def _expect(self, values: frozenset[int] | None) -> frozenset[int] | None:
        """Allow the old and the new values; return the new ones, for a write that succeeded."""
        self.values = None if self.values is None or values is None else self.values | values
        return values

    def wrong(self) -> str | None:
        """Describe the wrong elements; waits for the current stream."""
        seen = self.tensor.cpu()
        if self.values is None:
            return None
        low, high = int(seen.min()), int(seen.max())
        if low == high and low in self.values:
            return None
        where = int((seen != min(self.values)).nonzero()[0])
        return f"values {low} to {high} where {sorted(self.values)} must be, from element {where}"
