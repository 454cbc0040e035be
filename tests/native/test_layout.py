"""Static layouts: disjoint lifetimes share pages, and a wrong layout changes no result."""

from __future__ import annotations

from collections.abc import Iterator

import _core_testing
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planned import MIB, PAGE, Program, options

from umem import _core
from umem.errors import StateError
from umem.layout.packing import Lifetime, around

NO_PLACE = -1
MOVES = (
    "cuMemAllocManaged", "cuMemFree", "cuMemPrefetchBatchAsync", "cuMemDiscardBatchAsync",
    "cuMemDiscardAndPrefetchBatchAsync",
)  # fmt: skip


@pytest.fixture
def program() -> Iterator[Program]:
    _core.start(options(64 * MIB))
    _core_testing.instrument()
    made = Program()
    yield made
    made.clear()


def install(*entries: tuple[int, int], total: int) -> None:
    """Entries of (MiB, MiB from the start)."""
    sizes = np.array([mib * MIB for mib, _ in entries], np.int64)
    offsets = np.array([at if at < 0 else at * MIB for _, at in entries], np.int64)
    _core.install_layout(sizes, offsets, total * MIB)


def calls() -> int:
    return sum(_core_testing.calls(name) for name in MOVES)


def a_step(program: Program) -> list[int]:
    """`a` and `b` together, then `c` where both were."""
    places = [program.take("a", 4), program.take("b", 6)]
    program.op("a", "b")
    program.drop("a")
    program.drop("b")
    places.append(program.take("c", 10))
    program.op("c")
    program.drop("c")
    _core.step()
    return places


LAYOUT = ((4, 0), (6, 4), (10, 0))


def test_blocks_lie_where_the_layout_says_in_every_step(program: Program) -> None:
    install(*LAYOUT, total=10)
    made = calls()
    first = a_step(program)
    assert calls() > made  # its pages are populated
    assert [place - first[0] for place in first] == [0, 4 * MIB, 0]
    before = calls()
    assert [a_step(program) for _ in range(3)] == [first] * 3
    assert calls() == before  # the next block takes the frames as they are
    status = _core.layout_status()
    assert status == {
        "entries": 3, "bytes": 10 * MIB, "hits": 12, "misses": 0, "followed": True,
    }  # fmt: skip
    stats = _core.stats()
    assert stats["resident_bytes"] == stats["cached_bytes"] == 10 * MIB
    assert stats["bytes_discarded"] == stats["faults"] == 0


def test_without_a_layout_the_same_step_holds_both_sizes(program: Program) -> None:
    a_step(program)
    assert _core.stats()["resident_bytes"] == 20 * MIB


@pytest.mark.parametrize("sizes", [(4, 6, 8), (6, 4, 10), (4, 10), (4, 6, 10, 4)])
def test_from_the_first_difference_on_blocks_lie_elsewhere(
    program: Program, sizes: tuple[int, ...]
) -> None:
    install(*LAYOUT, total=10)
    inside = {a_step(program)[0] + at * MIB for at in (0, 4)}
    equal = [size == planned for size, (planned, _) in zip(sizes, LAYOUT, strict=False)]
    right = equal.index(False) if False in equal else len(LAYOUT)
    for i, size in enumerate(sizes):
        if i == 2:  # the third one is where the others were
            program.drop("0")
            program.drop("1")
        place = program.take(str(i), size)
        assert (place in inside) == (i < right)
    for name in list(program.at):
        program.drop(name)
    _core.step()
    status = _core.layout_status()
    assert (status["misses"], status["followed"]) == (1, False)
    a_step(program)
    assert _core.layout_status()["followed"]  # it is armed again


def test_a_step_that_ends_early_is_a_miss(program: Program) -> None:
    install(*LAYOUT, total=10)
    program.take("a", 4)
    _core.step()
    assert _core.layout_status()["misses"] == 1
    program.drop("a")


def test_a_place_that_is_taken_is_not_given_again(program: Program) -> None:
    install(*LAYOUT, total=10)
    program.take("a", 4)
    program.take("b", 6)
    program.drop("b")
    program.take("c", 10)  # a is still live there
    program.check("a")
    assert program.at["c"] != program.at["a"]
    assert _core.layout_status()["misses"] == 1


def test_small_blocks_and_those_without_a_place_do_not_matter(program: Program) -> None:
    install((4, 0), (8, NO_PLACE), (4, 0), total=4)
    for _ in range(2):
        program.take("a", 4)
        small = _core.allocate(5000)
        program.take("long", 8)
        program.drop("a")
        program.take("b", 4)
        program.drop("b")
        program.drop("long")
        _core.release(small)
        _core.step()
    assert _core.layout_status()["hits"] == 4
    assert _core.layout_status()["misses"] == 0


def test_a_layout_is_not_replaced_while_a_block_is_in_it(program: Program) -> None:
    install(*LAYOUT, total=10)
    program.take("a", 4)
    with pytest.raises(StateError, match="blocks of an earlier layout are alive"):
        install((4, 0), total=4)
    program.take("b", 6)  # the earlier one serves no more
    assert _core.layout_status()["hits"] == 1
    program.drop("a")
    install((4, 0), total=4)
    assert _core.layout_status()["bytes"] == 4 * MIB


def test_a_trim_gives_the_range_back(program: Program) -> None:
    install(*LAYOUT, total=10)
    a_step(program)
    _core.trim()
    assert _core.layout_status()["bytes"] == 0
    assert _core.stats()["cached_bytes"] == _core.stats()["resident_bytes"] == 0
    a_step(program)


def test_clear_waits_for_the_last_block(program: Program) -> None:
    install(*LAYOUT, total=10)
    program.take("a", 4)
    _core.clear_layout()
    program.check("a")
    program.drop("a")
    _core.clear_layout()
    assert _core.layout_status()["bytes"] == 0


@pytest.mark.parametrize(
    ("size", "offset", "total"),
    [(4 * MIB, 2 * MIB, 4 * MIB), (MIB, 0, 4 * MIB), (4 * MIB, MIB, 8 * MIB), (4 * MIB, 0, 0)],
)
def test_a_layout_that_is_none_is_refused(
    program: Program, size: int, offset: int, total: int
) -> None:
    del program
    with pytest.raises(ValueError, match="whole pages of 2 MiB, within its"):
        _core.install_layout(np.array([size]), np.array([offset]), total)


def test_columns_of_two_lengths_are_refused(program: Program) -> None:
    del program
    with pytest.raises(ValueError, match="columns of one length"):
        _core.install_layout(np.array([PAGE]), np.array([0, 0]), PAGE)


def test_short_memory_evicts_and_drops_what_the_layout_holds() -> None:
    _core.start(options(16 * MIB))
    program = Program()
    program.take("weight", 8)
    install(*LAYOUT, total=10)
    for _ in range(4):
        a_step(program)  # 8 + 10 MiB: the weight leaves
        program.op("weight")  # and returns to the memory of dead blocks
        stats = _core.stats()
        assert stats["resident_bytes"] <= 16 * MIB
    assert stats["bytes_discarded"] > 0
    assert stats["bytes_in"] >= 4 * 8 * MIB
    assert _core.layout_status()["misses"] == 0
    program.drop("weight")
    _core.trim()
    stats = _core.stats()
    assert stats["resident_bytes"] == stats["host_bytes"] == stats["dropped_bytes"] == 0
    program.clear()


def test_what_was_evicted_and_died_is_not_brought_back() -> None:
    _core.start(options(16 * MIB))
    program = Program()
    install((8, 0), (8, 8), (8, 0), total=16)
    program.take("a", 8)
    program.take("b", 8)
    _core.evict(program.at["a"], 8 * MIB)
    assert program.state("a") == "host"
    program.drop("a")  # touched for its check: faults fetched it
    moved = _core.stats()["bytes_in"]
    program.take("c", 8)
    assert program.state("c") == "device"
    assert _core.stats()["bytes_in"] == moved
    program.clear()


def test_blocks_of_several_pieces_share_pages_with_others() -> None:
    _core.start(options(16 * MIB, piece_bytes=4 * MIB))
    program = Program()
    install((6, 0), (10, 0), (8, 2), total=10)
    for _ in range(3):
        for name, mib in (("a", 6), ("b", 10), ("c", 8)):
            program.take(name, mib)
            program.op(name)
            program.drop(name)
        _core.step()
    assert _core.layout_status()["misses"] == 0
    assert _core.stats()["resident_bytes"] == 10 * MIB
    program.clear()


@st.composite
def repeated_steps(draw: st.DrawFn) -> tuple[list[Lifetime], int, int]:
    """Blocks of MiB with lives in a step of so many ops, some into the next; budget in MiB."""
    ops = draw(st.integers(2, 8))
    blocks = []
    for _ in range(draw(st.integers(1, 10))):
        begin = draw(st.integers(0, ops - 1))
        mib = 2 * draw(st.integers(1, 6))
        blocks.append(Lifetime(mib * MIB, begin, begin + draw(st.integers(1, ops))))
    blocks.sort(key=lambda block: block.begin)  # as they are allocated
    return blocks, ops, draw(st.sampled_from([14, 24, 200]))


@settings(max_examples=60)
@given(step=repeated_steps(), evicts=st.lists(st.integers(0, 99), max_size=6))
def test_any_step_keeps_its_bytes_in_its_layout(
    step: tuple[list[Lifetime], int, int], evicts: list[int]
) -> None:
    blocks, ops, budget = step
    packing = around(blocks, ops)
    _core.start(options(budget * MIB, piece_bytes=4 * MIB))
    program = Program()
    program.take("weight", 6)
    _core.install_layout(
        np.array([block.bytes for block in blocks], np.int64),
        np.array(packing.offsets, np.int64),
        packing.height,
    )
    ends: dict[str, int] = {}
    for now in range(5 * ops):
        for name in [name for name, end in ends.items() if end == now]:
            program.drop(name)  # its bytes are what they were
            del ends[name]
        for i, block in enumerate(blocks):
            if block.begin == now % ops:
                program.take(f"{i}@{now}", block.bytes // MIB)
                ends[f"{i}@{now}"] = now + block.end - block.begin
        program.op(*list(ends)[:3], *(["weight"] if now % 3 == 0 else []))
        if now % 7 in evicts and ends:
            name = list(ends)[evicts[0] % len(ends)]
            _core.evict(program.at[name], program.bytes[name])
        assert _core.stats()["resident_bytes"] <= budget * MIB
        if (now + 1) % ops == 0:
            _core.step()
            status = _core.layout_status()
            assert (status["misses"], status["followed"]) == (0, True)
    assert _core.layout_status()["hits"] == 5 * len(blocks)
    for name in [*ends, "weight"]:
        program.drop(name)
    _core.trim()
    stats = _core.stats()
    left = ("resident_bytes", "host_bytes", "dropped_bytes", "cached_bytes", "live_bytes")
    assert [stats[name] for name in left] == [0] * len(left)
    _core.stop()
