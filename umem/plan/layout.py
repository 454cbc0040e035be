"""Static layouts: an offset for each large tensor that a step allocates, the same in every step.

Tensors of disjoint lives share addresses. What persists (weights, optimizer states) lies apart: it
keeps the range that it has. Small tensors share pages as they do without a layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..trace.step import Ints, Kind, StepTrace
from . import packing
from .packing import Block, Packer, lowest

NO_PLACE = -1  # the offset of a tensor that is allocated as without a layout


@dataclass(frozen=True)
class Layout:
    """Columns of equal length: the large tensors that the step allocates, in that order."""

    tensor: Ints  # of the step
    sizes: Ints  # bytes, in whole pages
    offsets: Ints  # bytes from the begin of the layout's range; NO_PLACE for none
    bytes: int  # of the range
    load: int  # the most bytes in it at once: no layout of the same tensors is smaller


def layout(step: StepTrace, pack: Packer = lowest, *, guess: bool = True) -> Layout:
    """The layout of a step in steady state; sizes are whole pages, and so are offsets.

    A tensor that lives on into the next step has a place if it is freed there before it is made
    anew; otherwise NO_PLACE. One whose end is not known (a single recorded step does not tell of
    gradients that are cleared before the next one's first op) is taken to be freed at the step's
    end, as in replay; without `guess` it has NO_PLACE.
    """
    tensor = step.allocations
    blocks, placed = [], []
    for at, t in enumerate(tensor.tolist()):
        end = _end(step, t, guess)
        if end is not None:
            blocks.append(Block(int(step.bytes[t]), int(step.first[t]), end))
            placed.append(at)
    offsets = np.full(len(tensor), NO_PLACE, np.int64)
    packed = packing.around(blocks, step.n_ops, pack)
    offsets[placed] = packed.offsets
    return Layout(tensor, step.bytes[tensor], offsets, packed.height, _load(blocks, step.n_ops))


def _end(step: StepTrace, tensor: int, guess: bool) -> int | None:
    """The op before which it is freed, counted from the step's begin; None: it has no place."""
    if step.kind[tensor] == Kind.TRANSIENT:
        return int(step.last[tensor]) + 1
    if step.kind[tensor] != Kind.MADE:
        return None
    after = np.flatnonzero((step.twin == tensor) & (step.kind == Kind.CARRIED))
    if not len(after):
        return step.n_ops if guess else None
    end = int(step.last[after[0]]) + 1
    return step.n_ops + end if end <= step.first[tensor] else None


def _load(blocks: list[Block], period: int) -> int:
    """The most bytes alive at once where the step repeats: what wraps is there at both ends."""
    parts = [b._replace(end=min(b.end, period)) for b in blocks]
    parts += [Block(b.bytes, 0, b.end - period) for b in blocks if b.end > period]
    return packing.load(parts)
