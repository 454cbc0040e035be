"""Static layouts: an offset for each large tensor that a step allocates, the same in every step.

Tensors with disjoint lifetimes share addresses. Persistent tensors (weights, optimizer states) are
not part of the layout and keep their addresses. Small tensors share pages as they do without a
layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..trace.step_trace import Ints, Kind, StepTrace
from . import packing
from .packing import Lifetime, Packer, lowest

NO_PLACE = -1  # the offset of a tensor that the layout does not place
_MOVES = 4  # of each byte of a step that memory is missing for: out and in, in both passes
_BRIEF = 8  # a tensor that lives for this part of a step's ops, or less, is brief
_MOST = 4000  # tensors of a resident layout: packing takes time with their square


@dataclass(frozen=True)
class Layout:
    """A layout as columns of equal length: the large tensors of the step in allocation order."""

    tensor: Ints  # indices of the step's tensors
    sizes: Ints  # bytes, in whole pages
    offsets: Ints  # bytes from the start of the layout's range, or NO_PLACE
    bytes: int  # the size of the range
    load: int  # max bytes alive at once, a lower bound of `bytes` for the same tensors

    def without(self, step: StepTrace) -> StepTrace:
        """Return the step in pieces, as if those of tensors with a place had no bytes."""
        pieces = step.pieces
        assert pieces.whole is not None
        placed = np.isin(pieces.whole, self.tensor[self.offsets != NO_PLACE])
        large = pieces.large & ~placed
        return replace(pieces, bytes=np.where(placed, 0, pieces.bytes), large=large)


def layout(step: StepTrace, pack: Packer = lowest, *, guess: bool = True) -> Layout:
    """Return the layout of a step in steady state; sizes and offsets are in whole pages.

    A tensor that is alive into the next step is placed if it is freed there before it is allocated
    again; otherwise it has NO_PLACE. If the end of a lifetime is not known (a single recorded
    step does not show gradients that are cleared before the next step's first op), the tensor is
    assumed to be freed at the end of the step, as in replay; without `guess` it has NO_PLACE.
    """
    blocks = {
        at: Lifetime(int(step.bytes[t]), int(step.first[t]), end)
        for at, t in enumerate(step.allocations.tolist())
        if (end := _end(step, t, guess)) is not None
    }
    return _packed(step, blocks, pack)


def resident(
    step: StepTrace,
    limits: Sequence[int],
    saved_us: float,
    bytes_per_us: float,
    pack: Packer = lowest,
) -> Layout | None:
    """Return the best layout of some tensors of a step in memory that never leaves the device.

    It places tensors that live briefly: in the order of their bytes times their ops, each that fits
    beside those before it at every op of its life. Only transient tensors are placed. Memory that
    is idle on average is missing elsewhere, so that as many bytes move out and in, twice a step.

    Args:
        step: the step.
        limits: the sizes to choose from, in bytes.
        saved_us: time that each placed tensor saves.
        bytes_per_us: the link's rate.

    Returns:
        The layout; None if none saves time.
    """
    may = (step.kind == Kind.TRANSIENT) & step.movable
    if step.updates is not None:
        may[step.updates.gradient] = False  # it moves to the host
    ops = step.last - step.first + 1
    may &= ops <= max(step.n_ops // _BRIEF, 1)
    area = (step.bytes * ops)[step.allocations]
    order = [at for at in np.argsort(area, kind="stable").tolist() if may[step.allocations[at]]]
    order = order[:_MOST]
    best, most = None, 0.0
    for limit in limits:
        placed, live = _beside(step, order, limit)
        idle = limit - float(live @ step.op_us) / max(step.compute_us, 1.0)
        saved = len(placed) * saved_us - _MOVES * idle / bytes_per_us
        if saved > most:
            best, most = (placed, limit), saved
    if best is None:
        return None
    placed, limit = best
    blocks = {
        at: Lifetime(int(step.bytes[t]), int(step.first[t]), int(step.last[t]) + 1)
        for at, t in zip(placed, step.allocations[placed].tolist(), strict=True)
    }
    return _packed(step, blocks, pack, limit)


def _beside(step: StepTrace, order: Sequence[int], limit: int) -> tuple[list[int], Ints]:
    """Return which allocations fit in `limit` bytes, taken in this order, and their bytes by op."""
    live = np.zeros(step.n_ops, np.int64)
    placed = []
    for at in order:
        t = int(step.allocations[at])
        of_life = slice(int(step.first[t]), int(step.last[t]) + 1)
        if live[of_life].max() + step.bytes[t] <= limit:
            live[of_life] += step.bytes[t]
            placed.append(at)
    return placed, live


def _packed(
    step: StepTrace, blocks: Mapping[int, Lifetime], pack: Packer, limit: int | None = None
) -> Layout:
    """Return the layout of these allocations; those that end beyond the limit have no place."""
    tensor = step.allocations
    packed = packing.around([*blocks.values()], step.n_ops, pack)
    offsets = np.full(len(tensor), NO_PLACE, np.int64)
    placed, height = [], 0
    for (at, block), offset in zip(blocks.items(), packed.offsets, strict=True):
        if limit is None or offset + block.bytes <= limit:
            offsets[at], height = offset, max(height, offset + block.bytes)
            placed.append(block)
    return Layout(tensor, step.bytes[tensor], offsets, height, _load(placed, step.n_ops))


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


def _load(blocks: Iterable[Lifetime], period: int) -> int:
    """Return the max bytes alive at once where the step repeats, so that lifetimes wrap around."""
    parts = []
    for block in blocks:
        parts.append(block._replace(end=min(block.end, period)))
        if block.end > period:
            parts.append(Lifetime(block.bytes, 0, block.end - period))
    return packing.load(parts)
