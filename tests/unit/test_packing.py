"""Packing: offsets of blocks whose lifetimes are known."""

from __future__ import annotations

import random
import statistics
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umem.errors import PlanError
from umem.layout.packing import Lifetime, Packer, Packing, around, best_fit, first_fit, load, lowest

packers = pytest.mark.parametrize("pack", [best_fit, first_fit, lowest])


@pytest.mark.parametrize(
    ("rows", "best", "first", "height"),
    [
        ([(4, 0, 4), (2, 1, 3), (2, 4, 6), (4, 3, 6)], (0, 4, 0, 4), (0, 4, 0, 4), 8),
        (
            [(8, 0, 10), (4, 1, 9), (2, 2, 8), (6, 8, 12), (4, 9, 12)],
            (0, 8, 12, 12, 8),
            (0, 14, 8, 8, 14),
            18,
        ),
        ([(3, 0, 2), (3, 1, 4), (3, 3, 6), (6, 2, 3)], (3, 0, 3, 3), (0, 6, 0, 0), 9),
    ],
)
def test_known_packings(
    rows: list[tuple[int, int, int]], best: tuple[int, ...], first: tuple[int, ...], height: int
) -> None:
    blocks = [Lifetime(*row) for row in rows]
    assert best_fit(blocks) == Packing(best, height)
    assert first_fit(blocks) == Packing(first, height)
    assert load(blocks) == height


def test_weights_are_placed_before_larger_blocks() -> None:
    blocks = [Lifetime(8, 1, 3), Lifetime(2, 0, 4)]
    assert first_fit(blocks).offsets == (2, 0)


@st.composite
def lives(draw: st.DrawFn) -> list[Lifetime]:
    blocks = []
    for _ in range(draw(st.integers(0, 24))):
        begin = draw(st.integers(0, 20))
        blocks.append(Lifetime(draw(st.integers(1, 64)), begin, begin + draw(st.integers(1, 12))))
    return blocks


@packers
@settings(max_examples=150)
@given(blocks=lives())
def test_no_two_blocks_share_bytes_at_a_time(pack: Packer, blocks: list[Lifetime]) -> None:
    offsets, height = pack(blocks)
    assert len(offsets) == len(blocks)
    placed = list(zip(blocks, offsets, strict=True))
    for (a, low), (b, other) in combinations(placed, 2):
        together = a.begin < b.end and b.begin < a.end
        assert not together or low + a.bytes <= other or other + b.bytes <= low
    assert all(offset >= 0 for offset in offsets)
    assert height == max((offset + block.bytes for block, offset in placed), default=0)
    assert height >= load(blocks)


@packers
@given(blocks=lives(), factor=st.integers(2, 5))
@settings(max_examples=50)
def test_sizes_scale(pack: Packer, blocks: list[Lifetime], factor: int) -> None:
    scaled = [block._replace(bytes=block.bytes * factor) for block in blocks]
    offsets = tuple(offset * factor for offset in pack(blocks).offsets)
    assert pack(scaled).offsets == offsets


@packers
def test_disjoint_lives_share_all_bytes(pack: Packer) -> None:
    blocks = [Lifetime(7, i, i + 1) for i in range(50)]
    assert pack(blocks) == Packing((0,) * 50, 7)


def _training_like(rng: random.Random) -> list[Lifetime]:
    """40 nested lives, as of activations, and 40 blocks of 1 to 3 steps."""
    nested = [Lifetime(rng.randint(1, 64), i, 80 - i) for i in range(40)]
    begins = [rng.randint(0, 76) for _ in range(40)]
    return nested + [Lifetime(rng.randint(1, 64), t, t + rng.randint(1, 3)) for t in begins]


@pytest.mark.parametrize(
    ("pack", "mean", "worst"), [(best_fit, 1.002, 1.05), (first_fit, 1.01, 1.09)]
)
def test_height_is_close_to_the_load(pack: Packer, mean: float, worst: float) -> None:
    ratios = []
    for seed in range(100):
        blocks = _training_like(random.Random(seed))
        ratios.append(pack(blocks).height / load(blocks))
    assert statistics.mean(ratios) <= mean
    assert max(ratios) <= worst


@packers
@pytest.mark.parametrize(
    "block", [Lifetime(0, 0, 1), Lifetime(-4, 0, 1), Lifetime(1, 3, 3), Lifetime(1, 4, 3)]
)
def test_a_block_without_bytes_or_life_is_refused(pack: Packer, block: Lifetime) -> None:
    with pytest.raises(PlanError, match=r"block 1 .* cannot be placed"):
        pack([Lifetime(1, 0, 1), block])


def _shares_at(block: Lifetime, time: int, period: int) -> bool:
    return block.begin <= time < block.end or block.begin <= time + period < block.end


@st.composite
def repeating(draw: st.DrawFn) -> tuple[list[Lifetime], int]:
    period = draw(st.integers(1, 12))
    blocks = []
    for _ in range(draw(st.integers(0, 12))):
        begin = draw(st.integers(0, period - 1))
        blocks.append(
            Lifetime(draw(st.integers(1, 64)), begin, begin + draw(st.integers(1, period)))
        )
    return blocks, period


@packers
@settings(max_examples=150)
@given(step=repeating())
def test_around_the_steps_end_no_two_blocks_share_bytes(
    pack: Packer, step: tuple[list[Lifetime], int]
) -> None:
    blocks, period = step
    offsets, height = around(blocks, period, pack)
    placed = list(zip(blocks, offsets, strict=True))
    for (a, low), (b, other) in combinations(placed, 2):
        together = any(_shares_at(a, t, period) and _shares_at(b, t, period) for t in range(period))
        assert not together or low + a.bytes <= other or other + b.bytes <= low
    assert height == max((offset + block.bytes for block, offset in placed), default=0)


@packers
def test_a_step_that_leaves_nothing_behind_is_packed_as_it_is(pack: Packer) -> None:
    blocks = _training_like(random.Random(1))
    assert around(blocks, 100, pack).height == pack(blocks).height


def test_gradients_that_are_cleared_at_the_next_begin_cost_nothing_more() -> None:
    """Activations and gradients take turns, whichever side of the step's end the gradients die."""
    layers, period = 8, 20
    activations = [Lifetime(10, i, 2 * layers - i) for i in range(layers)]
    gradients = [Lifetime(10, 2 * layers - i - 1, period + 1) for i in range(layers)]
    blocks = activations + gradients
    assert around(blocks, period).height <= 10 * (layers + 2)


@pytest.mark.parametrize("block", [Lifetime(1, 5, 6), Lifetime(1, -1, 1), Lifetime(1, 2, 8)])
def test_around_refuses_what_outlives_the_step(block: Lifetime) -> None:
    with pytest.raises(PlanError, match="cannot be placed in a step of 5"):
        around([block], 5)
