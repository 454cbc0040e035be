"""Static layouts: an offset for each large tensor that a step allocates, the same in every step.

Tensors with disjoint lifetimes share addresses. Persistent tensors (weights, optimizer states) are
not part of the layout and keep their addresses. Small tensors share pages as they do without a
layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..trace.step_trace import Ints, Kind, StepTrace
from . import packing
from .packing import Lifetime, Packer, lowest

NO_PLACE = -1  # the offset of a tensor that the layout does not place


@dataclass(frozen=True)
class Layout:
    """A layout as columns of equal length: the large tensors of the step in allocation order."""

    tensor: Ints  # indices of the step's tensors
    sizes: Ints  # bytes, in whole pages
    offsets: Ints  # bytes from the start of the layout's range, or NO_PLACE
    bytes: int  # the size of the range
    load: int  # max bytes alive at once, a lower bound of `bytes` for the same tensors


def layout(step: StepTrace, pack: Packer = lowest, *, guess: bool = True) -> Layout:
    """Return the layout of a step in steady state; sizes and offsets are in whole pages.

    A tensor that is alive into the next step is placed if it is freed there before it is allocated
    again; otherwise it has NO_PLACE. If the end of a lifetime is not known (a single recorded
    step does not show gradients that are cleared before the next step's first op), the tensor is
    assumed to be freed at the end of the step, as in replay; without `guess` it has NO_PLACE.
    """
    tensor = step.allocations
    blocks, placed = [], []
    for at, t in enumerate(tensor.tolist()):
        end = _end(step, t, guess)
        if end is not None:
            blocks.append(Lifetime(int(step.bytes[t]), int(step.first[t]), end))
            placed.append(at)
    offsets = np.full(len(tensor), NO_PLACE, np.int64)
    packed = packing.around(blocks, step.n_ops, pack)
    offsets[placed] = packed.offsets
    return Layout(tensor, step.bytes[tensor], offsets, packed.height, _load(blocks, step.n_ops))


def _end(step: StepTrace, tensor: int, guess: bool) -> int | None:
    """Return the op before which a tensor is freed, from the step's start; None: not placed."""
    if step.kind[tensor] == Kind.TRANSIENT:
        return int(step.last[tensor]) + 1
    if step.kind[tensor] != Kind.MADE:
        return None
    after = np.flatnonzero((step.next_alias == tensor) & (step.kind == Kind.CARRIED))
    if not len(after):
        return step.n_ops if guess else None
    end = int(step.last[after[0]]) + 1
    return step.n_ops + end if end <= step.first[tensor] else None


def _load(blocks: list[Lifetime], period: int) -> int:
    """Return the max bytes alive at once where the step repeats, so that lifetimes wrap around."""
    parts = [b._replace(end=min(b.end, period)) for b in blocks]
    parts += [Lifetime(b.bytes, 0, b.end - period) for b in blocks if b.end > period]
    return packing.load(parts)
