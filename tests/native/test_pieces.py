"""Blocks that are larger than a piece: each piece is a unit that moves on its own."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planned import MIB, PAGE, options

from umem import _core
from umem.base.units import PIECE_BYTES
from umem.errors import OutOfMemoryError

PIECE = 4 * MIB


@pytest.fixture(autouse=True)
def _stopped() -> object:
    yield
    _core.stop()


def start(budget: int = 16 * MIB, policy: str = "lru", **changes: object) -> None:
    _core.start(options(budget, policy=policy, piece_bytes=PIECE, **changes))


def units() -> list[tuple[int, str]]:
    """MiB and state of the live units, by address."""
    rows = sorted(_core.blocks(), key=lambda row: row["base"])
    return [
        (row["bytes"] // MIB, row["state"]) for row in rows if row["state"] not in ("dead", "gone")
    ]


def fill(ptr: int, nbytes: int, value: int) -> None:
    for offset in range(0, nbytes, PAGE):
        _core.driver.store(ptr + offset, bytes([value + offset // PAGE]) * 8)


def holds(ptr: int, nbytes: int, value: int) -> bool:
    pages = range(0, nbytes, PAGE)
    return all(
        _core.driver.load(ptr + offset, 8) == bytes([value + offset // PAGE]) * 8
        for offset in pages
    )


def test_the_size_is_the_one_that_plans_reckon_with() -> None:
    assert _core.Options().piece_bytes == PIECE_BYTES


def test_a_block_is_cut_into_pieces_and_the_rest() -> None:
    start()
    ptr = _core.allocate(10 * MIB)
    assert units() == [(4, "device"), (4, "device"), (2, "device")]
    assert _core.release(ptr)
    assert units() == []


def test_a_part_of_a_block_leaves_and_returns() -> None:
    start()
    ptr, other = _core.allocate(12 * MIB), _core.allocate(2 * MIB)
    fill(ptr, 12 * MIB, 1)
    _core.evict(ptr + PIECE, PIECE)
    assert [state for _, state in units() if state == "host"] == ["host"]
    assert _core.stats()["evictions"] == 1
    token = _core.op_begin([ptr], "", "")  # an op uses it whole
    assert {state for _, state in units()} == {"device"}
    _core.op_end(token, "")
    assert holds(ptr, 12 * MIB, 1)
    for address in (ptr, other):
        assert _core.release(address)


def test_pressure_takes_no_more_pieces_than_it_needs() -> None:
    start(budget=16 * MIB)
    first = _core.allocate(12 * MIB)
    fill(first, 12 * MIB, 10)
    second = _core.allocate(6 * MIB)  # 2 MiB too many: one piece goes
    assert _core.stats()["evictions"] == 1
    assert _core.stats()["bytes_out"] == PIECE
    fill(second, 6 * MIB, 50)
    assert holds(first, 12 * MIB, 10)
    assert holds(second, 6 * MIB, 50)
    for ptr in (first, second):
        assert _core.release(ptr)


def test_the_pieces_of_a_new_block_do_not_drive_each_other_out() -> None:
    start(budget=8 * MIB)
    ptr = _core.allocate(20 * MIB)  # more than the budget: what does not fit comes by faults
    assert [state for _, state in units()][:2] == ["device", "device"]
    assert _core.stats()["evictions"] == 0
    fill(ptr, 20 * MIB, 3)
    assert holds(ptr, 20 * MIB, 3)
    assert _core.release(ptr)


def test_a_refused_block_leaves_nothing_behind() -> None:
    start(budget=8 * MIB, host_budget_bytes=8 * MIB)
    kept = _core.allocate(8 * MIB)
    with pytest.raises(OutOfMemoryError):
        _core.allocate(12 * MIB)
    assert units() == [(4, "device"), (4, "device")]
    assert _core.stats()["live_bytes"] == 8 * MIB
    assert _core.release(kept)
    assert _core.stats()["live_bytes"] == 0


def test_a_tag_is_that_of_all_pieces() -> None:
    start()
    ptr = _core.allocate(10 * MIB)
    assert _core.tag(ptr, "param")
    assert [row["tag"] for row in _core.blocks()] == ["param"] * 3
    assert _core.release(ptr)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "drop", "use", "evict", "fetch"]), st.integers(0, 40)),
        min_size=5,
        max_size=60,
    )
)
def test_random_programs_keep_their_bytes(program: list[tuple[str, int]]) -> None:
    start(budget=16 * MIB)
    live: dict[int, tuple[int, int]] = {}
    for serial, (what, number) in enumerate(program):
        if what == "take" and len(live) < 6:
            size = (number % 14 + 1) * MIB
            ptr = _core.allocate(size)
            live[ptr] = size, serial % 100
            fill(ptr, size, serial % 100)
        elif live:
            ptr = list(live)[number % len(live)]
            size, value = live[ptr]
            if what == "drop":
                del live[ptr]
                assert _core.release(ptr)
            elif what == "use":
                token = _core.op_begin([ptr], "", "")
                assert holds(ptr, size, value)
                _core.op_end(token, "")
            elif what == "evict":
                _core.evict(ptr + number * 4096 % size, 1)
            elif size >= PAGE:
                with contextlib.suppress(OutOfMemoryError):
                    _core.prefetch(ptr, size)
        assert _core.stats()["resident_bytes"] <= 16 * MIB
    for ptr, (size, value) in live.items():
        assert holds(ptr, size, value)
        assert _core.release(ptr)
    _core.stop()
