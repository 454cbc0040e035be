"""Pins, exemptions, discards and queries on the runtime without torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import _core_testing
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.planned import Program, columns, running, weights

from umem import _core
from umem.errors import ConfigError, OutOfMemoryError, StateError

MIB = 1 << 20
PAGE = 2 * MIB
PIECE = 64 * MIB


class Memory:
    """Live blocks, each filled with a byte that none was filled with before."""

    def __init__(self) -> None:
        self.live: dict[int, tuple[int, int]] = {}  # address: bytes, byte
        self.made = 0

    def take(self, nbytes: int) -> int:
        ptr = _core.allocate(nbytes)
        self.live[ptr] = nbytes, 0
        self.fill(ptr)
        return ptr

    def fill(self, ptr: int) -> None:
        self.made += 1
        nbytes, byte = self.live[ptr][0], self.made % 251 + 1
        self.live[ptr] = nbytes, byte
        token = _core.op_begin([ptr], "", "forward")
        _core_testing.store(ptr, bytes([byte]) * nbytes)
        _core.op_end(token, "")

    def drop(self, ptr: int) -> None:
        del self.live[ptr]
        assert _core.release(ptr)

    def intact(self, ptr: int, first: int = 0, last: int | None = None) -> bool:
        nbytes, byte = self.live[ptr]
        last = nbytes if last is None else last
        token = _core.op_begin([ptr], "", "forward")
        seen = _core_testing.load(ptr + first, last - first)
        _core.op_end(token, "")
        return bytes(seen) == bytes([byte]) * (last - first)

    def press(self, mib: int) -> None:
        held = [self.take(4 * MIB) for _ in range(mib // 4)]
        for ptr in held:
            self.drop(ptr)


@pytest.fixture
def memory() -> Iterator[Memory]:
    _core.start(made_options())
    held = Memory()
    yield held
    for ptr in list(held.live):
        held.drop(ptr)
    _core.stop()


def made_options(budget: int = 32 * MIB, **changes: object) -> _core.Options:
    made = _core.Options()
    made.budget_bytes, made.floor_bytes, made.min_swap_bytes = budget, 8 * MIB, PAGE
    made.profile = "a100-pcie4"
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def state(ptr: int, nbytes: int = 1) -> str:
    row: Any = _core.where(ptr, nbytes)
    places = ("resident_bytes", "evicted_bytes", "discarded_bytes", "unknown_bytes")
    assert sum(row[name] for name in places) == row["bytes"] == nbytes
    return next(name for name in places if row[name]).partition("_")[0]


def test_prefetch_of_several_leaves_none_of_them_behind(memory: Memory) -> None:
    ptrs = [memory.take(8 * MIB) for _ in range(4)]
    late = [memory.take(8 * MIB) for _ in range(4)]
    assert {state(ptr) for ptr in ptrs} == {"evicted"}
    _core.prefetch([(ptr, 8 * MIB) for ptr in ptrs])
    assert {state(ptr) for ptr in ptrs} == {"resident"}
    assert {state(ptr) for ptr in late} == {"evicted"}
    with pytest.raises(OutOfMemoryError, match="does not fit"):
        _core.prefetch([(ptr, 8 * MIB) for ptr in [*late, ptrs[0]]])
    assert all(memory.intact(ptr) for ptr in memory.live)


def test_what_is_there_already_does_not_leave_for_the_rest(memory: Memory) -> None:
    away, *there = [memory.take(4 * MIB) for _ in range(9)]
    assert state(away) == "evicted"
    before = _core.stats()["bytes_in"]
    _core.prefetch([(ptr, 4 * MIB) for ptr in (away, *there[:3])])  # there[0] is the oldest
    assert {state(ptr) for ptr in (away, *there[:3])} == {"resident"}
    assert _core.stats()["bytes_in"] - before == 4 * MIB


def test_the_size_of_a_block_counts_and_not_that_of_its_pieces() -> None:
    _core.start(made_options(160 * MIB, min_swap_bytes=80 * MIB, policy="lru"))
    memory = Memory()
    small, large = memory.take(8 * MIB), memory.take(96 * MIB)  # in pieces of at most 64 MiB
    other = memory.take(64 * MIB)
    assert state(small) == state(other) == "resident"
    row: Any = _core.where(large, 96 * MIB)
    assert row["evicted_bytes"] > 0
    for ptr in list(memory.live):
        memory.drop(ptr)
    _core.stop()


def test_evict_of_several_does_all_or_nothing(memory: Memory) -> None:
    a, b = memory.take(4 * MIB), memory.take(4 * MIB)
    token = _core.op_begin([b], "", "forward")
    with pytest.raises(StateError, match="in use"):
        _core.evict([(a, 1), (b, 1)])
    assert state(a) == "resident"
    _core.op_end(token, "")
    with pytest.raises(ConfigError, match="not in memory"):
        _core.evict([(a, 1), (0x1000, 1)])
    assert state(a) == "resident"
    _core.evict([(a, 1), (b, 1)])
    assert (state(a), state(b)) == ("evicted", "evicted")


def test_a_pin_ends_once(memory: Memory) -> None:
    ptr = memory.take(4 * MIB)
    first = _core.hold([(ptr, 4 * MIB)], "pin", ["x"])
    second = _core.hold([(ptr, 4 * MIB)], "pin", ["x"])
    assert _core.unpin(ptr, 4 * MIB)  # the newer one
    _core.unhold(second)
    assert _core.where(ptr, 1)["pins"] == 1
    _core.unhold(first)
    _core.unhold(first)
    _core.unhold(12345)
    assert _core.where(ptr, 1)["pins"] == 0
    assert not _core.unpin(ptr, 4 * MIB)


def test_pieces_are_pinned_one_by_one() -> None:
    with running(made_options(192 * MIB)):
        ptr = _core.allocate(3 * PIECE)
        _core.evict(ptr, 3 * PIECE)
        _core.hold([(ptr + PIECE + 5, 10)], "pin", ["middle"])
        assert [_core.where(ptr + i * PIECE, 1)["pins"] for i in range(3)] == [0, 1, 0]
        assert [state(ptr + i * PIECE) for i in range(3)] == ["evicted", "resident", "evicted"]
        row = _core.where(ptr, 3 * PIECE)
        assert (row["resident_bytes"], row["evicted_bytes"]) == (PIECE, 2 * PIECE)
        with pytest.raises(StateError, match="pinned"):
            _core.evict(ptr, 3 * PIECE)
        _core.evict(ptr + 2 * PIECE, PIECE)
        with pytest.raises(OutOfMemoryError, match=r"cannot pin 128\.0 MiB more.*10 bytes middle"):
            _core.hold([(ptr, 3 * PIECE)], "pin", ["all"])
        assert _core.release(ptr)


def test_pins_leave_the_reserve_and_bound_the_budget(memory: Memory) -> None:
    ptr = memory.take(24 * MIB)
    number = _core.hold([(ptr, 24 * MIB)], "pin", ["weights"])  # to the byte
    small = memory.take(PAGE)
    with pytest.raises(OutOfMemoryError, match=r"24\.0 MiB are pinned already.*weights"):
        _core.hold([(small, 1)], "pin", [""])
    with pytest.raises(OutOfMemoryError, match="the budget cannot be that low"):
        _core.set_budget(30 * MIB, 0)
    memory.press(40)  # continues in the reserve
    assert state(ptr) == "resident"
    _core.unhold(number)
    _core.set_budget(30 * MIB, 0)


def test_the_reserve_is_enough_for_an_op_that_needs_more(memory: Memory) -> None:
    ptr = memory.take(24 * MIB)
    _core.hold([(ptr, 24 * MIB)], "pin", ["weights"])
    large = memory.take(20 * MIB)  # by page faults
    assert memory.intact(large)
    assert memory.intact(ptr)


def test_rules_hold_for_what_comes_and_end(memory: Memory) -> None:
    before = memory.take(6 * MIB)
    number = _core.exempt_all("", 5 * MIB, 7 * MIB)
    tagged = _core.exempt_all("param", 0, 1 << 62)
    after, other, param = memory.take(6 * MIB), memory.take(4 * MIB), memory.take(4 * MIB)
    _core.tag(param, "param")
    found = [_core.where(ptr, 1)["exempt"] for ptr in (before, after, other, param)]
    assert found == [True, True, False, True]
    memory.press(40)
    assert [state(p) for p in (before, after, other, param)] == [
        "resident", "resident", "evicted", "resident",
    ]  # fmt: skip
    _core.unhold(number)
    _core.unhold(tagged)
    assert not any(_core.where(ptr, 1)["exempt"] for ptr in memory.live)
    memory.press(40)
    assert state(before) == "evicted"
    with pytest.raises(ConfigError, match="unknown tag"):
        _core.exempt_all("weight", 0, 1)


def test_rules_about_small_sizes_hold_for_their_pages(memory: Memory) -> None:
    small = memory.take(1000)
    for least, expected in ((0, True), (PAGE, False)):
        number = _core.exempt_all("", least, 1 << 62)
        assert _core.where(small, 1000)["exempt"] is expected
        _core.unhold(number)


def test_a_restart_forgets_pins_and_rules(memory: Memory) -> None:
    ptr = memory.take(4 * MIB)
    _core.hold([(ptr, 1)], "pin", [""])
    _core.exempt_all("", 0, 1 << 62)
    _core.stop()
    _core.start(made_options())
    row = _core.where(ptr, 1)
    assert (row["pins"], row["exempt"]) == (0, False)


def test_a_plan_does_not_send_out_what_is_pinned(program: Program) -> None:
    tensors = weights(program, "ab")
    plan = columns(tensors, [[0], [1], [1]], evict=[[0, 0], [1, 1]], fetch=[[1, 2, 1]])
    number = _core.hold([(program.at["a"], 1)], "pin", ["a"])
    _core.install_plan(plan)
    for _ in range(3):
        for name in "abb":
            program.op(name)
            assert "a" not in program.away()
        _core.step()
    stats = _core.stats()
    assert (stats["plan_hits"], stats["plan_misses"], stats["evictions"]) == (9, 0, 3)
    _core.unhold(number)
    program.op("a")
    assert program.away() == {"a"}


def test_blocks_of_a_layout_are_held_and_discarded_as_others() -> None:
    with running(made_options(64 * MIB, policy="planned")) as program:
        sizes, places = np.array([6 * MIB, 4 * MIB]), np.array([0, 0])
        _core.install_layout(sizes, places, 6 * MIB)
        at = set()
        for _ in range(3):
            first = program.take("a", 5)
            _core.hold([(first, 5 * MIB)], "pin", ["a"])
            _core.hold([(first, 1)], "exempt", ["a"])
            assert _core.where(first, 5 * MIB)["pins"] == 1
            with pytest.raises(StateError, match="pinned"):
                _core.evict(first, 1)
            program.drop("a")
            second = program.take("b", 4)  # on the same pages
            row = _core.where(second, 4 * MIB)
            assert (row["pins"], row["exempt"], row["bytes"]) == (0, False, 4 * MIB)
            assert _core.own_pages(second, 4 * MIB) == _core.discard(second, 4 * MIB) == 4 * MIB
            assert state(second, 4 * MIB) == "discarded"
            program.fill("b")
            program.op("b")
            _core.evict(second, 1)
            program.drop("b")
            _core.step()
            at |= {first, second}
        assert len(at) == 1
        assert _core.layout_status()["hits"] == 6


def test_discard_takes_whole_pages_only(memory: Memory) -> None:
    ptr = memory.take(9 * MIB)  # five pages
    assert _core.own_pages(ptr + 1, 9 * MIB - 1) == 8 * MIB  # the last one is its own to the end
    assert _core.own_pages(ptr + 1, 9 * MIB - 2) == 6 * MIB
    assert _core.discard(ptr + PAGE - 1, 2 * PAGE) == PAGE
    assert memory.intact(ptr, 0, PAGE)
    assert memory.intact(ptr, 2 * PAGE)
    assert state(ptr, 9 * MIB) == "resident"  # a part of a unit is not known to be away
    assert _core.discard(ptr, 9 * MIB) == 10 * MIB
    assert state(ptr, 9 * MIB) == "discarded"
    _core.evict(ptr, 9 * MIB)
    assert state(ptr, 9 * MIB) == "discarded"
    memory.fill(ptr)
    assert state(ptr, 9 * MIB) == "resident"
    _core.evict(ptr, 9 * MIB)
    assert memory.intact(ptr)


def test_discard_never_reaches_small_neighbours(memory: Memory) -> None:
    ptrs = [memory.take(700 * 1024) for _ in range(6)]
    for ptr in ptrs:
        assert _core.own_pages(ptr, 700 * 1024) == _core.discard(ptr, 700 * 1024) == 0
    memory.press(40)
    assert all(memory.intact(ptr) for ptr in ptrs)


def test_discard_of_what_is_read_mostly(memory: Memory) -> None:
    ptr = memory.take(4 * MIB)
    _core.read_mostly(ptr, 4 * MIB, True)
    _core.evict(ptr, 1)
    _core.prefetch(ptr, 1)
    assert _core.discard(ptr, 4 * MIB) == 4 * MIB
    memory.fill(ptr)
    memory.press(40)
    assert memory.intact(ptr)


def test_scopes_are_the_threads_own_and_go_with_the_block(memory: Memory) -> None:
    assert _core.set_scope("a") == ""
    large, small = memory.take(PAGE), memory.take(100)
    assert _core.set_scope("") == "a"
    rows = {row["address"]: row for row in _core.placed_blocks()}
    assert (rows[large]["scope"], rows[small]["scope"]) == ("a", "a")
    assert (rows[large]["bytes"], rows[small]["bytes"]) == (PAGE, 100)
    memory.drop(large)
    assert _core.where(memory.take(PAGE), 1)["scope"] == ""


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 30))
def test_random_hints_lose_nothing_and_keep_their_word(memory: Memory, seed: int) -> None:
    rng = random.Random(seed)
    pinned: dict[int, list[int]] = {}
    for _ in range(40):
        live = list(memory.live)
        act = rng.choice(["take", "take", "drop", "pin", "unpin", "evict", "prefetch", "discard"])
        if act == "take" or not live:
            if sum(n for n, _ in memory.live.values()) < 60 * MIB:
                memory.take(rng.choice([100, 5000, MIB, PAGE, 5 * MIB, 8 * MIB]))
            continue
        ptr = rng.choice(live)
        nbytes = memory.live[ptr][0]
        if act == "drop":
            memory.drop(ptr)
            pinned.pop(ptr, None)
        elif act == "pin":
            try:
                number = _core.hold([(ptr, nbytes)], "pin", [""])
            except OutOfMemoryError:
                continue
            pinned.setdefault(ptr, []).append(number)
        elif act == "unpin" and pinned.get(ptr):
            _core.unhold(pinned[ptr].pop(rng.randrange(len(pinned[ptr]))))
        elif act == "evict":
            held = _core.where(ptr, nbytes)["pins"] > 0
            try:
                _core.evict(ptr, nbytes)
                assert not held
            except StateError:
                assert held
        elif act == "prefetch":
            _core.prefetch(ptr, nbytes)
        elif act == "discard" and nbytes >= PAGE:
            assert _core.discard(ptr, nbytes) == -(-nbytes // PAGE) * PAGE
            memory.fill(ptr)
        for one, numbers in pinned.items():
            if numbers:
                assert state(one, memory.live[one][0]) == "resident"
    assert all(memory.intact(ptr) for ptr in memory.live)
    for ptr in list(memory.live):
        memory.drop(ptr)
    assert all(not row["pins"] for row in _core.placed_blocks())
