"""Packing: an offset for each block of a recorded step, so that disjoint lifetimes share bytes.

The problem (dynamic storage allocation) is NP-hard: rectangles of fixed time span and height go
into a strip of minimum height. The load, the max bytes alive at once, is a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import PlanError
from ..trace.step_trace import Ints


class Lifetime(NamedTuple):
    """A block of memory that is alive in [begin, end), by any clock that counts in integers."""

    bytes: int
    begin: int
    end: int


class Packing(NamedTuple):
    """The offsets of all blocks, in the given order, and the bytes of the range that holds them."""

    offsets: tuple[int, ...]
    height: int


Packer = Callable[[Sequence[Lifetime]], Packing]


class _Segment(NamedTuple):
    begin: int
    end: int
    height: int


def load(blocks: Sequence[Lifetime]) -> int:
    """Return the max bytes alive at once, a lower bound of the height of any packing."""
    change = sorted([(b.end, -b.bytes) for b in blocks] + [(b.begin, b.bytes) for b in blocks])
    most = now = 0
    for _, step in change:
        now += step
        most = max(most, now)
    return most


def best_fit(blocks: Sequence[Lifetime]) -> Packing:
    """Pack by best fit on a skyline, as in Sekiyama et al. 2018 (profile-guided planning).

    The lowest segment of the skyline (the leftmost among equals) takes the block with the longest
    lifetime, then the most bytes, of those alive only within it; if there is none, the segment
    rises to its lower neighbour. O(n^2) for n blocks.

    Raises:
        PlanError: a block has no bytes or an empty lifetime.
    """
    _check(blocks)
    if not blocks:
        return Packing((), 0)
    rank = sorted(
        range(len(blocks)), key=lambda i: (blocks[i].begin - blocks[i].end, -blocks[i].bytes)
    )
    begin = np.array([blocks[i].begin for i in rank])
    end = np.array([blocks[i].end for i in rank])
    left = np.ones(len(rank), np.bool_)
    skyline = [_Segment(int(begin.min()), int(end.max()), 0)]
    offsets = [0] * len(blocks)
    for _ in blocks:
        while True:
            at = min(range(len(skyline)), key=lambda k: (skyline[k].height, k))
            low = skyline[at]
            fits = left & (begin >= low.begin) & (end <= low.end)
            first = int(np.argmax(fits))
            if fits[first]:
                break
            _raise(skyline, at)
        left[first] = False
        block = blocks[rank[first]]
        offsets[rank[first]] = low.height
        _place(skyline, at, block)
    return _packed(blocks, offsets)


def first_fit(blocks: Sequence[Lifetime]) -> Packing:
    """Pack by first-fit weighted colouring, SmartPool of Zhang et al. 2019.

    Blocks that are alive all the time (weights) come first, then the others, each group by
    descending bytes. Each block goes into the lowest hole among the placed blocks whose lifetimes
    overlap its own. O(n^2 log n) for n blocks.

    Raises:
        PlanError: a block has no bytes or an empty lifetime.
    """
    _check(blocks)
    if not blocks:
        return Packing((), 0)
    whole = (min(b.begin for b in blocks), max(b.end for b in blocks))
    order = sorted(
        range(len(blocks)),
        key=lambda i: ((blocks[i].begin, blocks[i].end) != whole, -blocks[i].bytes),
    )
    begin = np.array([b.begin for b in blocks])
    end = np.array([b.end for b in blocks])
    low, high = np.zeros(len(blocks), np.int64), np.zeros(len(blocks), np.int64)
    placed = np.zeros(len(blocks), np.bool_)
    for i in order:
        beside = np.flatnonzero(placed & (begin < end[i]) & (begin[i] < end))
        low[i] = _lowest_hole(low[beside], high[beside], blocks[i].bytes)
        high[i] = low[i] + blocks[i].bytes
        placed[i] = True
    return _packed(blocks, low.tolist())


def lowest(blocks: Sequence[Lifetime]) -> Packing:
    """Pack by both methods and return the lower packing; which one that is depends on the step.

    Raises:
        PlanError: a block has no bytes or an empty lifetime.
    """
    found = best_fit(blocks)
    if found.height == load(blocks):
        return found
    return min(found, first_fit(blocks), key=lambda packing: packing.height)


def around(blocks: Sequence[Lifetime], period: int, pack: Packer = lowest) -> Packing:
    """Pack the blocks of a step that repeats every `period`, with the same offsets each time.

    A block begins within the step, in [0, period), and may end in the next one, before it begins
    again there. The step is cut where the blocks that are alive have the fewest bytes. These get
    the lowest offsets; `pack` places the others above them.

    Raises:
        PlanError: a block has no bytes or an empty lifetime, begins outside the step, or is alive
            for longer than the period.
    """
    _check(blocks)
    for i, block in enumerate(blocks):
        if not 0 <= block.begin < period or block.end - block.begin > period:
            raise PlanError(
                f"block {i} {tuple(block)} cannot be placed in a step of {period}: it needs a "
                f"begin in the step and a lifetime of up to {period}"
            )
    cut = _thinnest(blocks, period)
    turned = [b._replace(begin=t, end=t + b.end - b.begin)
              for b in blocks for t in ((b.begin - cut) % period,)]  # fmt: skip
    below = [i for i, block in enumerate(turned) if block.end > period]
    above = [i for i, block in enumerate(turned) if block.end <= period]
    offsets = [0] * len(blocks)
    top = 0
    for i in below:
        offsets[i] = top
        top += blocks[i].bytes
    packing = pack([turned[i] for i in above])
    for i, offset in zip(above, packing.offsets, strict=True):
        offsets[i] = top + offset
    return Packing(tuple(offsets), top + packing.height)


def _thinnest(blocks: Sequence[Lifetime], period: int) -> int:
    """Return the first time in [0, period) across which the fewest bytes are alive."""
    change = np.zeros(2 * period + 1, np.int64)
    for block in blocks:  # alive across t if it begins before t and ends after t
        change[block.begin + 1] += block.bytes
        change[block.end] -= block.bytes
    across = np.cumsum(change)
    return int(np.argmin(across[:period] + across[period : 2 * period]))


def _lowest_hole(low: Ints, high: Ints, size: int) -> int:
    """Return the lowest offset with `size` bytes outside of the ranges [low, high)."""
    order = np.argsort(low, kind="stable")
    tops = np.maximum.accumulate(np.concatenate(([0], high[order])))
    holes = np.flatnonzero(low[order] - tops[:-1] >= size)
    return int(tops[holes[0]] if len(holes) else tops[-1])


def _raise(skyline: list[_Segment], at: int) -> None:
    """Raise a segment to the height of its lower neighbour."""
    sides = [skyline[k].height for k in (at - 1, at + 1) if 0 <= k < len(skyline)]
    skyline[at] = skyline[at]._replace(height=min(sides))
    _merge(skyline, at)


def _place(skyline: list[_Segment], at: int, block: Lifetime) -> None:
    """Raise the block's part of a segment by its bytes."""
    low = skyline[at]
    parts = [
        _Segment(low.begin, block.begin, low.height),
        _Segment(block.begin, block.end, low.height + block.bytes),
        _Segment(block.end, low.end, low.height),
    ]
    parts = [part for part in parts if part.begin < part.end]
    skyline[at : at + 1] = parts
    for k in range(at + len(parts) - 1, at - 1, -1):
        _merge(skyline, k)


def _merge(skyline: list[_Segment], at: int) -> None:
    """Merge a segment with neighbours of its height."""
    for left in (at, at - 1):
        pair = skyline[max(left, 0) : left + 2]
        if len(pair) == 2 and pair[0].height == pair[1].height:
            skyline[left : left + 2] = [pair[0]._replace(end=pair[1].end)]


def _packed(blocks: Sequence[Lifetime], offsets: Sequence[int]) -> Packing:
    height = max(offset + block.bytes for offset, block in zip(offsets, blocks, strict=True))
    return Packing(tuple(offsets), height)


def _check(blocks: Sequence[Lifetime]) -> None:
    for i, block in enumerate(blocks):
        if block.bytes <= 0 or block.begin >= block.end:
            raise PlanError(
                f"block {i} {tuple(block)} cannot be placed: it needs bytes above 0 and a begin "
                "before its end"
            )
