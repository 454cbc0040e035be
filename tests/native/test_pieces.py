"""Blocks that are larger than a piece: each piece is a unit that moves on its own."""

from __future__ import annotations

import contextlib

import _core_testing
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planned import MIB, PAGE, Tensor, columns, options

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
    rows = sorted(_core_testing.blocks(), key=lambda row: row["base"])
    return [
        (row["bytes"] // MIB, row["state"]) for row in rows if row["state"] not in ("dead", "gone")
    ]


def fill(ptr: int, nbytes: int, value: int) -> None:
    for offset in range(0, nbytes, PAGE):
        _core_testing.store(ptr + offset, bytes([value + offset // PAGE]) * 8)


def holds(ptr: int, nbytes: int, value: int) -> bool:
    pages = range(0, nbytes, PAGE)
    return all(
        _core_testing.load(ptr + offset, 8) == bytes([value + offset // PAGE]) * 8
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
    second = _core.allocate(6 * MIB)  # 2 MiB too many: one piece leaves
    assert _core.stats()["evictions"] == 1
    assert _core.stats()["bytes_out"] == PIECE
    fill(second, 6 * MIB, 50)
    assert holds(first, 12 * MIB, 10)
    assert holds(second, 6 * MIB, 50)
    for ptr in (first, second):
        assert _core.release(ptr)


def test_the_pieces_of_a_new_block_do_not_drive_each_other_out() -> None:
    start(budget=8 * MIB)
    ptr = _core.allocate(20 * MIB)  # more than the budget: faults fetch the rest
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
    assert [row["tag"] for row in _core_testing.blocks()] == ["param"] * 3
    assert _core.release(ptr)


def test_an_op_on_a_part_needs_the_pieces_that_hold_some_of_it() -> None:
    start(budget=12 * MIB)
    ptr, other = _core.allocate(12 * MIB), _core.allocate(12 * MIB)  # drives the first out
    fill(ptr, 12 * MIB, 1)
    _core.evict(ptr, 12 * MIB)
    assert set(states(ptr, 12 * MIB)) == {"host"}
    token = _core.op_begin([ptr], "", "", parts={0: (PIECE // 2, PIECE)})
    assert states(ptr, 12 * MIB) == ["device", "device", "host"]
    with pytest.raises(IndexError, match="an input that there is not"):
        _core.op_begin([ptr], "", "", parts={1: (0, 1)})
    _core.op_end(token, "")
    token = _core.op_begin([ptr + MIB], "", "", parts={0: (8 * MIB, 3 * MIB)})  # within the storage
    assert states(ptr, 12 * MIB)[2] == "device"
    _core.op_end(token, "")
    assert holds(ptr, 12 * MIB, 1)
    for address in (ptr, other):
        assert _core.release(address)


def test_without_a_plan_an_op_on_a_part_that_is_away_has_the_block_cut() -> None:
    _core.start(options(16 * MIB, policy="lru"))
    ptr = _core.allocate(12 * MIB)
    fill(ptr, 12 * MIB, 1)
    other = _core.allocate(12 * MIB)  # drives the first out
    token = _core.op_begin([other], "", "", parts={0: (0, 4)})
    _core.op_end(token, "")
    assert sorted(units()) == [(12, "device"), (12, "host")]  # resident pieces are not touched
    before = _core.stats()["bytes_in"]
    token = _core.op_begin([ptr], "", "", parts={0: (0, 7 * MIB)})  # of more than a half
    assert [size for size, _ in units()] == [12, 12]
    _core.op_end(token, "")
    _core.evict(ptr, 1)
    token = _core.op_begin([ptr, ptr], "", "", parts={0: (3 * MIB, 2 * MIB), 1: (9 * MIB, 5)})
    assert states(ptr, 12 * MIB) == ["host", "device", "device", "host", "device", "host"]
    assert _core.stats()["bytes_in"] - before == (12 + 6) * MIB
    _core.op_end(token, "")
    assert _core.cut_sizes() == [12 * MIB]
    assert [size for size, _ in units()].count(2) == 6  # the other one is not used yet
    assert holds(ptr, 12 * MIB, 1)
    for address in (ptr, other):
        assert _core.release(address)


def states(ptr: int, nbytes: int) -> list[str]:
    """The units of a block, by address."""
    rows = sorted(_core_testing.blocks(), key=lambda row: row["base"])
    return [row["state"] for row in rows if ptr <= row["base"] < ptr + nbytes]


def cut(*blocks: tuple[int, int], sizes: tuple[int, ...]) -> None:
    """Install a plan for a step that uses these blocks, which has blocks of `sizes` cut."""
    tensors = [Tensor(-(-nbytes // PAGE) * 2, address=ptr) for ptr, nbytes in blocks]
    _core.install_plan(columns(tensors, [list(range(len(tensors)))], cut=sizes))


def test_a_plan_has_live_blocks_cut_and_their_bytes_stay_where_they_are() -> None:
    _core.start(options(24 * MIB))  # pieces of 64 MiB
    ptr, other = _core.allocate(16 * MIB), _core.allocate(16 * MIB)
    fill(ptr, 16 * MIB, 1)
    fill(other, 16 * MIB, 50)
    _core.evict(ptr, 1)
    assert units() == [(16, "host"), (16, "device")]
    before = _core.stats()
    cut((ptr, 16 * MIB), (other, 16 * MIB), sizes=(16 * MIB,))
    assert sorted(units()) == [(2, "device")] * 8 + [(2, "host")] * 8
    assert _core.cut_sizes() == [16 * MIB]
    after = _core.stats()
    assert {key for key in before if before[key] != after[key]} <= {"plans_installed"}
    assert holds(ptr, 16 * MIB, 1)
    assert holds(other, 16 * MIB, 50)
    _core.evict(other, PAGE)
    token = _core.op_begin([ptr], "", "", parts={0: (3 * MIB, MIB)})
    assert states(ptr, 16 * MIB) == ["host", "device"] + ["host"] * 6
    _core.op_end(token, "")
    assert holds(other, 16 * MIB, 50)
    for address in (ptr, other):
        assert _core.release(address)


def test_what_is_cut_goes_by_the_size_of_the_range() -> None:
    _core.start(options(256 * MIB))
    first = _core.allocate(70 * MIB)
    cut((first, 70 * MIB), sizes=(66 * MIB,))  # in ranges of 72 MiB as well
    assert _core.cut_sizes() == [72 * MIB] == [_core.range_bytes(70 * MIB)]
    assert [size for size, _ in units()] == [2] * 35
    assert _core.finer_piece(70 * MIB) == PAGE
    assert _core.finer_piece(1 << 30) == 8 * MIB
    assert _core.finer_piece(64 << 30) == PIECE_BYTES  # larger ones are not cut into more
    second, third = _core.allocate(71 * MIB), _core.allocate(73 * MIB)
    assert len(units()) == 35 + 36 + 2
    for ptr in (first, second, third):
        assert _core.release(ptr)
    _core.stop()
    _core.start(options(256 * MIB))
    assert _core.cut_sizes() == []
    assert _core.release(_core.allocate(70 * MIB))


def test_a_block_in_use_is_cut_once_it_serves_another() -> None:
    _core.start(options(64 * MIB))
    ptr = _core.allocate(16 * MIB)
    token = _core.op_begin([ptr], "", "")
    cut((ptr, 16 * MIB), sizes=(16 * MIB,))
    assert units() == [(16, "device")]
    _core.op_end(token, "")
    assert _core.release(ptr)
    again = _core.allocate(16 * MIB)
    assert again == ptr
    assert units() == [(2, "device")] * 8
    assert _core.release(again)


def test_the_programs_pins_are_on_the_pieces_that_they_are_of() -> None:
    _core.start(options(32 * MIB))
    ptr = _core.allocate(16 * MIB)
    part = _core.hold([(ptr + 5 * MIB, 10)], "pin", ["a part"])
    every = _core.hold([(ptr, 16 * MIB)], "exempt", [""])
    assert _core.stats()["pinned_bytes"] == 16 * MIB
    cut((ptr, 16 * MIB), sizes=(16 * MIB,))
    assert _core.stats()["pinned_bytes"] == PAGE
    rows = [_core.where(ptr + i * PAGE, 1) for i in range(8)]
    assert [row["pins"] for row in rows] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert all(row["exempt"] for row in rows)
    _core.unhold(part)
    _core.unhold(every)
    assert _core.stats()["pinned_bytes"] == 0
    assert not any(_core.where(ptr + i * PAGE, 1)["exempt"] for i in range(8))
    _core.evict(ptr, 16 * MIB)
    assert _core.release(ptr)


def test_what_sleeps_is_cut_once_it_is_awake() -> None:
    _core.start(options(32 * MIB))
    ptr = _core.allocate(16 * MIB)
    fill(ptr, 16 * MIB, 1)
    assert _core.tag(ptr, "param")
    number = _core.sleep(["param"], False)[0]
    cut((ptr, 16 * MIB), sizes=(16 * MIB,))
    assert units() == [(16, "host")]
    assert _core.wake(["param"], number) == 16 * MIB
    cut((ptr, 16 * MIB), sizes=())
    assert units() == [(2, "device")] * 8
    number = _core.sleep(["param"], False)[0]
    assert units() == [(2, "host")] * 8
    assert _core.wake(["param"], number) == 16 * MIB
    assert holds(ptr, 16 * MIB, 1)
    assert _core.release(ptr)


def test_advice_to_the_driver_stays_with_the_bytes_or_ends() -> None:
    _core.start(options(32 * MIB))
    ptr, own = _core.allocate(16 * MIB), _core.allocate(14 * MIB)
    for address, nbytes, value in ((ptr, 16 * MIB, 1), (own, 14 * MIB, 50)):
        fill(address, nbytes, value)
        _core.evict(address, nbytes)
        _core.prefetch(address, nbytes)
    _core.read_mostly(own, 14 * MIB, True)  # the program's
    blocks = [Tensor(16, address=ptr), Tensor(14, address=own)]
    _core.install_plan(columns(blocks, [[0, 1]], read_mostly=[0]))
    assert units() == [(16, "device"), (14, "device")] or units() == [
        (14, "device"),
        (16, "device"),
    ]
    cut((ptr, 16 * MIB), (own, 14 * MIB), sizes=(16 * MIB, 14 * MIB))
    assert len(units()) == 15
    fill(own, PAGE, 60)  # a write takes the page's copy on the host away
    for address, nbytes in ((ptr, 16 * MIB), (own, 14 * MIB)):
        _core.evict(address, nbytes)
        _core.prefetch(address, nbytes)
    assert holds(ptr, 16 * MIB, 1)
    assert _core_testing.load(own, 8) == bytes([60]) * 8
    assert holds(own + PAGE, 12 * MIB, 51)
    for address in (ptr, own):
        assert _core.release(address)


def test_a_cut_range_serves_smaller_blocks_and_goes_back() -> None:
    _core.start(options(64 * MIB))
    first = _core.allocate(34 * MIB)  # in a range of 36
    cut((first, 34 * MIB), sizes=(34 * MIB,))
    assert units() == [(2, "device")] * 17
    assert _core.release(first)
    for nbytes in (36 * MIB, 34 * MIB, 36 * MIB):
        again = _core.allocate(nbytes)
        assert again == first
        assert [size for size, _ in units()] == [2] * (nbytes // PAGE)
        assert _core.stats()["resident_bytes"] >= nbytes
        fill(again, nbytes, 3)
        _core.evict(again, nbytes)
        assert holds(again, nbytes, 3)
        assert _core.release(again)
    assert units() == []
    _core.trim()
    assert _core.stats()["host_bytes"] == 0
    assert _core.stats()["resident_bytes"] == 0


def test_ids_of_cut_ranges_serve_again() -> None:
    _core.start(options(64 * MIB))
    for round_ in range(40):
        ptrs = [_core.allocate((8 + 2 * (i + round_) % 7 * 2) * MIB) for i in range(3)]
        cut(*[(ptr, 8 * MIB) for ptr in ptrs], sizes=(16 * MIB,))
        for i, ptr in enumerate(ptrs):
            fill(ptr, 8 * MIB, i)
        assert all(holds(ptr, 8 * MIB, i) for i, ptr in enumerate(ptrs))
        for ptr in ptrs:
            assert _core.release(ptr)
        _core.trim()
        assert _core_testing.blocks() == []


def test_a_layouts_blocks_are_cut_when_they_are_taken() -> None:
    _core.start(options(64 * MIB))
    sizes, offsets = np.array([16 * MIB, 16 * MIB]), np.array([0, 16 * MIB])
    _core.install_layout(sizes, offsets, 32 * MIB)
    _core.step()
    first, second = _core.allocate(16 * MIB), _core.allocate(16 * MIB)
    assert _core.layout_status()["hits"] == 2
    fill(first, 16 * MIB, 1)
    cut((first, 16 * MIB), (second, 16 * MIB), sizes=(16 * MIB,))
    assert units() == [(16, "device")] * 2  # alive
    assert holds(first, 16 * MIB, 1)
    for ptr in (first, second):
        assert _core.release(ptr)
    _core.step()
    first, second = _core.allocate(16 * MIB), _core.allocate(16 * MIB)
    assert _core.layout_status()["hits"] == 4
    assert units() == [(2, "device")] * 16
    fill(first, 16 * MIB, 1)
    fill(second, 16 * MIB, 50)
    _core.evict(first, 1)
    assert holds(first, 16 * MIB, 1)
    assert holds(second, 16 * MIB, 50)
    for ptr in (first, second):
        assert _core.release(ptr)
    _core.clear_layout()


def test_a_plan_moves_the_parts_that_ops_use() -> None:
    with contextlib.ExitStack() as ended:
        _core.start(options(8 * MIB))
        ptr = _core.allocate(16 * MIB)
        ended.callback(_core.release, ptr)
        fill(ptr, 16 * MIB, 1)
        pieces = [Tensor(2, address=ptr + i * PAGE) for i in range(8)]
        ops = [[2 * i, 2 * i + 1] for i in range(4)]
        moves = {
            "evict": [(i, t) for i, op in enumerate(ops) for t in op],
            "fetch": [(i, i + 1, t) for i in range(3) for t in ops[i + 1]],
        }
        _core.install_plan(columns(pieces, ops, cut=[16 * MIB], **moves))
        assert len(units()) == 8
        for step in range(5):
            before = _core.stats()
            for i in range(4):
                token = _core.op_begin([ptr], "", "", parts={0: (4 * i * MIB, 4 * MIB)})
                assert _core_testing.load(ptr + 4 * i * MIB, 8) == bytes([1 + 2 * i]) * 8
                _core.op_end(token, "")
            _core.step()
            after = _core.stats()
            if step >= 2:
                assert after["plan_hits"] - before["plan_hits"] == 4
                assert after["bytes_in"] - before["bytes_in"] == 16 * MIB
                assert after["faults"] == before["faults"]
        assert holds(ptr, 16 * MIB, 1)


@settings(max_examples=40)
@given(
    st.booleans(),
    st.lists(
        st.tuples(
            st.sampled_from(["take", "drop", "use", "part", "evict", "fetch", "cut"]),
            st.integers(0, 40),
        ),
        min_size=5,
        max_size=60,
    ),
)
def test_random_programs_keep_their_bytes(planned: bool, program: list[tuple[str, int]]) -> None:
    start(budget=16 * MIB, policy="planned" if planned else "lru")
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
            elif what == "part":
                offset = number * 300_000 % size
                token = _core.op_begin([ptr], "", "", parts={0: (offset, size - offset)})
                assert holds(ptr, size, value)
                _core.op_end(token, "")
            elif what == "cut" and planned and size >= PAGE:
                large = [(p, held) for p, (held, _) in live.items() if held >= PAGE]
                cut(*large, sizes=(size,))
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
