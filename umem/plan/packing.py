"""Static planning: an offset for each block of a recorded step, so that disjoint lives share bytes.

The problem (dynamic storage allocation) is NP-hard: rectangles of fixed time span and height go
into a strip of least height. The load, the most bytes alive at once, is a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import PlanError
from ..trace.step import Ints


class Block(NamedTuple):
    """A block of memory: alive in [begin, end), by any clock that counts in integers."""

    bytes: int
    begin: int
    end: int


class Packing(NamedTuple):
    """Where each block lies, in the order given, and the bytes that hold them all."""

    offsets: tuple[int, ...]
    height: int


Packer = Callable[[Sequence[Block]], Packing]


class _Segment(NamedTuple):
    begin: int
    end: int
    height: int


def load(blocks: Sequence[Block]) -> int:
    """The most bytes alive at once: no packing is lower."""
    change = sorted([(b.end, -b.bytes) for b in blocks] + [(b.begin, b.bytes) for b in blocks])
    most = now = 0
    for _, step in change:
        now += step
        most = max(most, now)
    return most


def best_fit(blocks: Sequence[Block]) -> Packing:
    """Packs by best fit on a skyline, as in Sekiyama et al. 2018 (profile-guided planning).

    The lowest stretch of the skyline (the leftmost of equals) takes the block with the longest
    life, then the most bytes, of those that live within it; without one it rises to its lower
    neighbour. O(n^2) for n blocks.

    Raises:
        PlanError: a block has no bytes or no life.
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


def first_fit(blocks: Sequence[Block]) -> Packing:
    """Packs by first-fit weighted colouring, SmartPool of Zhang et al. 2019.

    Blocks that live all the time (weights) come first, then the others, each by bytes downwards:
    at the lowest hole among the placed blocks whose lives overlap. O(n^2 log n) for n blocks.

    Raises:
        PlanError: a block has no bytes or no life.
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


def lowest(blocks: Sequence[Block]) -> Packing:
    """The lower of what both packers find: which one that is differs from step to step.

    Raises:
        PlanError: a block has no bytes or no life.
    """
    found = best_fit(blocks)
    if found.height == load(blocks):
        return found
    return min(found, first_fit(blocks), key=lambda packing: packing.height)


def around(blocks: Sequence[Block], period: int, pack: Packer = lowest) -> Packing:
    """Packs the blocks of a step that repeats every `period`: the same offsets in every repeat.

    A block begins within the step, in [0, period), and may end in the next one, before it begins
    anew there. The step is cut where the blocks that are alive have the fewest bytes. Those lie at
    the bottom, below everything else; `pack` places the others.

    Raises:
        PlanError: a block has no bytes or no life, begins outside the step, or outlives it.
    """
    _check(blocks)
    for i, block in enumerate(blocks):
        if not 0 <= block.begin < period or block.end - block.begin > period:
            raise PlanError(
                f"block {i} {tuple(block)} has no place in a step of {period}: it needs a begin in "
                f"the step and a life of up to {period}"
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


def _thinnest(blocks: Sequence[Block], period: int) -> int:
    """The time, of [0, period), across which the fewest bytes are alive: the first of them."""
    change = np.zeros(2 * period + 1, np.int64)
    for block in blocks:  # across t, if it began before and ends after
        change[block.begin + 1] += block.bytes
        change[block.end] -= block.bytes
    across = np.cumsum(change)
    return int(np.argmin(across[:period] + across[period : 2 * period]))


def _lowest_hole(low: Ints, high: Ints, size: int) -> int:
    """The lowest offset with `size` bytes free of the ranges [low, high)."""
    order = np.argsort(low, kind="stable")
    tops = np.maximum.accumulate(np.concatenate(([0], high[order])))
    holes = np.flatnonzero(low[order] - tops[:-1] >= size)
    return int(tops[holes[0]] if len(holes) else tops[-1])


def _raise(skyline: list[_Segment], at: int) -> None:
    """Lifts a stretch to its lower neighbour's height."""
    sides = [skyline[k].height for k in (at - 1, at + 1) if 0 <= k < len(skyline)]
    skyline[at] = skyline[at]._replace(height=min(sides))
    _merge(skyline, at)


def _place(skyline: list[_Segment], at: int, block: Block) -> None:
    """Raises the block's part of a stretch by its bytes."""
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
    """Joins a stretch with neighbours of its height."""
    for left in (at, at - 1):
        pair = skyline[max(left, 0) : left + 2]
        if len(pair) == 2 and pair[0].height == pair[1].height:
            skyline[left : left + 2] = [pair[0]._replace(end=pair[1].end)]


def _packed(blocks: Sequence[Block], offsets: Sequence[int]) -> Packing:
    height = max(offset + block.bytes for offset, block in zip(offsets, blocks, strict=True))
    return Packing(tuple(offsets), height)


def _check(blocks: Sequence[Block]) -> None:
    for i, block in enumerate(blocks):
        if block.bytes <= 0 or block.begin >= block.end:
            raise PlanError(
                f"block {i} {tuple(block)} cannot be placed: it needs bytes above 0 and a begin "
                "before its end"
            )
