"""Sleep and wake without torch: the released memory, its return, and the cost."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator

import _core_testing
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.planned import MIB, PAGE, Program, columns, options, running, weights

from umem import _core
from umem.errors import ConfigError, OutOfMemoryError, StateError

ALL = _core.tags()
FRAMES = 16


def free_pages() -> int:
    (memory,) = _core.device_memory()
    assert _core_testing.cuMemGetInfo() == (0, memory["free_bytes"], memory["total_bytes"])
    return memory["free_bytes"] // PAGE


@pytest.fixture(params=["lru", "planned", "none"])
def anyhow(request: pytest.FixtureRequest) -> Iterator[Program]:
    """A program under each kind of policy, on a device of 32 MiB."""
    with running(options(FRAMES * PAGE, policy=request.param)) as made:
        yield made


@pytest.fixture
def program() -> Iterator[Program]:
    with running(options(FRAMES * PAGE, policy="lru")) as made:
        yield made


def test_all_memory_is_given_back_and_comes_back(anyhow: Program) -> None:
    for name in "abc":
        anyhow.take(name)
    anyhow.take("freed", 6)
    anyhow.drop("freed")
    small = _core.allocate(1000)
    _core_testing.store(small, b"x")
    assert free_pages() < FRAMES
    number, given_back, shown_free = _core.sleep(ALL, False)
    assert shown_free
    assert free_pages() == FRAMES
    assert number > 0
    assert given_back >= 12 * MIB + PAGE
    stats = _core.stats()
    assert stats["resident_bytes"] == 0
    assert stats["cached_bytes"] == PAGE - 1024  # in addition to the small block
    assert stats["asleep_bytes"] == 12 * MIB + PAGE
    assert _core.wake(ALL, 0) == 12 * MIB + PAGE
    assert free_pages() == FRAMES - 7
    assert _core.stats()["asleep_bytes"] == 0
    for name in "abc":
        anyhow.check(name)
    assert _core_testing.load(small, 1) == b"x"
    assert _core.release(small)


def test_only_the_named_tags_sleep_and_wake(program: Program) -> None:
    for name, tag in (("p", "param"), ("g", "grad"), ("o", "optimizer")):
        _core.tag(program.take(name), tag)
    _core.sleep(["param", "grad"], False)
    assert program.away() == {"p", "g"}
    assert _core.wake(["grad"], 0) == 4 * MIB
    assert program.away() == {"p"}
    assert _core.wake(["optimizer"], 0) == 0
    assert _core.wake(ALL, 0) == 4 * MIB
    assert program.away() == set()


def test_an_inner_sleep_wakes_what_it_sent_away_itself(program: Program) -> None:
    for name, tag in (("p", "param"), ("g", "grad")):
        _core.tag(program.take(name), tag)
    outer, *_ = _core.sleep(["param"], False)
    inner, *_ = _core.sleep(ALL, False)
    assert _core.wake(ALL, inner) == 4 * MIB
    assert program.away() == {"p"}
    assert _core.wake(ALL, inner) == 0
    assert _core.wake(ALL, outer) == 4 * MIB
    assert program.away() == set()


def test_who_came_back_and_sleeps_again_is_of_the_later_sleep(program: Program) -> None:
    program.take("a")
    program.take("b")
    outer, *_ = _core.sleep(ALL, False)
    program.op("a")
    inner, *_ = _core.sleep(ALL, False)
    assert _core.stats()["asleep_bytes"] == 8 * MIB
    assert _core.wake(ALL, outer) == 4 * MIB
    assert program.away() == {"a"}
    assert _core.wake(ALL, inner) == 4 * MIB


def test_an_op_brings_what_it_needs_and_an_allocation_gets_memory(program: Program) -> None:
    for name in "abc":
        program.take(name)
    faults = _core.stats()["faults"]
    _core.sleep(ALL, False)
    program.op("b")
    assert program.away() == {"a", "c"}
    program.take("new")
    assert _core.stats()["faults"] == faults
    assert _core.stats()["asleep_bytes"] == 8 * MIB
    assert _core.wake(ALL, 0) == 8 * MIB
    assert program.away() == set()


def test_a_plan_does_not_end_a_sleep_and_brings_what_wakes() -> None:
    with running(options(FRAMES * PAGE, policy="planned")) as program:
        plan = columns(weights(program, "abc"), [[0], [1], [0], [2]], gated=1,
                       occupancy=[12 * MIB] * 4, capacity=FRAMES * PAGE)  # fmt: skip
        _core.install_plan(plan)
        for name in "abac":
            program.op(name)
        _core.step()
        program.op("a")
        _core.sleep(ALL, False)
        program.op("b")
        assert program.away() == {"a", "c"}
        _core.set_budget(8 * MIB, 0)
        assert _core.wake(ALL, 0) == 4 * MIB  # there is no room for both
        assert program.away() == {"c"}
        _core.set_budget(FRAMES * PAGE, 0)
        program.op("a")
        assert program.away() == set()  # before its op


def test_units_are_by_last_use_as_they_were(program: Program) -> None:
    for name in "abcd":
        program.take(name)
    program.op("b")
    program.op("a")
    _core.sleep(ALL, False)
    _core.wake(ALL, 0)
    for budget, away in ((12, "c"), (8, "cd")):
        _core.set_budget(budget * MIB, 0)
        assert program.away() == set(away)


def test_without_room_for_all_the_last_used_come(program: Program) -> None:
    for name in "abcd":
        program.take(name)
    _core.sleep(ALL, False)
    _core.set_budget(8 * MIB, 0)
    evictions = _core.stats()["evictions"]
    assert _core.wake(ALL, 0) == 8 * MIB
    assert program.away() == {"a", "b"}
    assert _core.stats()["evictions"] == evictions  # no block leaves for a sleeper


def test_a_freed_block_does_not_come_back(program: Program) -> None:
    program.take("a")
    program.take("b")
    _core.sleep(ALL, False)
    program.drop("a")
    program.take("other")  # in a's range, perhaps
    assert _core.stats()["asleep_bytes"] == 4 * MIB
    assert _core.wake(ALL, 0) == 4 * MIB


def test_discarded_bytes_are_not_copied_out(program: Program) -> None:
    _core.tag(program.take("g"), "grad")
    program.take("a")
    before = _core.stats()
    _core.sleep(["grad"], True)
    after = _core.stats()
    assert after["bytes_out"] == before["bytes_out"]
    assert after["bytes_discarded"] - before["bytes_discarded"] == 4 * MIB
    assert free_pages() == FRAMES - 2
    assert program.away() == {"g"}
    assert _core.wake(ALL, 0) == 4 * MIB
    assert program.away() == set()
    program.fill("g")  # memory like any other


def test_a_driver_without_discards_counts_none(program: Program) -> None:
    _core.tag(program.take("g"), "grad")
    _core_testing.instrument()
    try:
        for nth in range(1, 10):
            _core_testing.inject("cuMemDiscardBatchAsync", nth, 500)  # CUDA_ERROR_NOT_FOUND
        _core.sleep(["grad"], True)
        assert _core.stats()["bytes_discarded"] == 0
        assert _core.stats()["bytes_out"] == 4 * MIB
        assert free_pages() == FRAMES
        assert program.away() == {"g"}
        assert _core.wake(ALL, 0) == 4 * MIB
    finally:
        _core_testing.clear_injections()


def test_what_is_written_unseen_after_a_discard_stays(program: Program) -> None:
    """By an access outside of umem's ops; neither waking nor sleeping again may lose it."""
    _core.tag(program.take("g"), "grad")
    for act in (lambda: _core.wake(ALL, 0), lambda: _core.sleep(ALL, False)):
        _core.sleep(["grad"], True)
        program.fill("g")
        act()
        program.check("g")
    _core.sleep(ALL, False)  # the check has brought it
    assert free_pages() == FRAMES
    _core.wake(ALL, 0)


def test_what_is_on_the_host_is_discarded_there(program: Program) -> None:
    _core.tag(program.take("g"), "grad")
    _core.evict(program.at["g"], 4 * MIB)
    before = _core.stats()["bytes_discarded"]
    _core.sleep(["grad"], True)
    assert _core.stats()["bytes_discarded"] == before + 4 * MIB
    assert program.away() == {"g"}
    assert _core.wake(ALL, 0) == 0  # it was away before
    program.fill("g")


def test_read_mostly_blocks_sleep_and_keep_their_advice(program: Program) -> None:
    program.take("a")
    _core.read_mostly(program.at["a"], 4 * MIB, True)
    for _ in range(2):
        _core.sleep(ALL, False)
        assert free_pages() == FRAMES
        _core.wake(ALL, 0)
    out = _core.stats()["bytes_out"]
    _core.sleep(ALL, False)
    assert _core.stats()["bytes_out"] == out  # the host's copy is valid
    _core.wake(ALL, 0)
    program.check("a")


def test_a_host_without_room_is_an_error_before_anything_moves() -> None:
    limited = options(FRAMES * PAGE, policy="lru", host_budget_bytes=6 * MIB)
    with running(limited) as program:
        for name in "ab":
            program.take(name)
        before = _core.stats()
        with pytest.raises(OutOfMemoryError, match=r"8\.0 MiB more.*of 6\.0 MiB; raise the h"):
            _core.sleep(ALL, False)
        after = _core.stats()
        moved = ("bytes_out", "evictions", "asleep_bytes", "resident_bytes")
        assert [after[name] for name in moved] == [before[name] for name in moved]
        _core.set_budget(FRAMES * PAGE, 8 * MIB)
        _core.sleep(ALL, False)
        assert _core.stats()["peak_host_bytes"] <= 8 * MIB
        _core.wake(ALL, 0)


def test_bytes_to_be_lost_need_no_host_room() -> None:
    with running(options(FRAMES * PAGE, policy="lru", host_budget_bytes=PAGE)) as program:
        _core.tag(program.take("g"), "grad")
        _core.sleep(["grad"], True)
        assert _core.stats()["resident_bytes"] == 0
        assert _core.stats()["host_bytes"] <= PAGE
        _core.wake(ALL, 0)
        program.fill("g")


def test_no_sleep_in_the_middle_of_an_op(program: Program) -> None:
    program.take("a")
    token = _core.op_begin([program.at["a"]], "", "forward")
    with pytest.raises(StateError, match="a running op uses memory"):
        _core.sleep(ALL, False)
    assert program.away() == set()
    _core.sleep(["grad"], False)  # not used by the op
    _core.op_end(token, "")
    _core.sleep(ALL, False)
    assert program.away() == {"a"}


def test_pins_do_not_keep_awake_and_are_there_again_after_wake(anyhow: Program) -> None:
    for name in "abc":
        anyhow.take(name)
    number = _core.hold([(anyhow.at["a"], 4 * MIB)], "pin", ["a"])
    _core.sleep(ALL, False)
    assert free_pages() == FRAMES
    assert _core.where(anyhow.at["a"], 1)["pins"] == 1
    assert _core.stats()["pinned_bytes"] == 4 * MIB
    assert _core.wake(["param"], 0) == 0
    assert _core.wake(ALL, 0) == 12 * MIB
    assert free_pages() == FRAMES - 6
    with pytest.raises(StateError, match="pinned"):
        _core.evict(anyhow.at["a"], 4 * MIB)
    _core.unhold(number)
    assert _core.stats()["pinned_bytes"] == 0
    for name in "abc":
        anyhow.check(name)


def test_others_leave_for_a_pin_that_wakes_and_for_it_alone(program: Program) -> None:
    for name in "abcd":
        program.take(name)
    _core.hold([(program.at["b"], 4 * MIB)], "pin", ["b"])
    _core.sleep(ALL, False)
    for name in "efghijkl":  # the whole budget
        program.take(name)
    assert _core.wake(ALL, 0) == 4 * MIB
    assert program.away() == {"a", "c", "d", "e"}
    for name in program.at:
        program.check(name)


def test_a_pin_finds_no_space_while_ops_run_and_an_op_brings_it(program: Program) -> None:
    program.take("a")
    _core.hold([(program.at["a"], 4 * MIB)], "pin", ["a"])
    _core.sleep(ALL, False)
    names = "bcdefghi"
    for name in names:
        program.take(name)
    token = _core.op_begin([program.at[name] for name in names], "", "forward")
    with pytest.raises(OutOfMemoryError, match="does not fit in addition to the memory in use"):
        _core.wake(ALL, 0)
    _core.op_end(token, "")
    program.op("a")
    assert "a" not in program.away()
    with pytest.raises(StateError, match="pinned"):
        _core.evict(program.at["a"], 4 * MIB)
    for name in program.at:
        program.check(name)


def test_pins_count_while_they_sleep(program: Program) -> None:
    for name in "ab":
        program.take(name, 12)
    number = _core.hold([(program.at["a"], 12 * MIB)], "pin", ["a"])
    _core.sleep(ALL, False)
    with pytest.raises(OutOfMemoryError, match="budget cannot be that low"):
        _core.set_budget(14 * MIB, 0)
    with pytest.raises(OutOfMemoryError, match=r"12\.0 MiB are pinned already"):
        _core.hold([(program.take("c", 18), 18 * MIB)], "pin", ["c"])
    _core.unhold(number)  # no longer to be there at any price
    _core.set_budget(14 * MIB, 0)
    assert _core.wake(ALL, 0) == 12 * MIB
    assert program.away() >= {"a"}
    program.take("d")
    other = _core.hold([(program.at["d"], 4 * MIB)], "pin", ["d"])
    _core.sleep(ALL, False)
    _core.hold([(program.at["d"], 4 * MIB)], "pin", ["d"])  # brings it in, and is the second
    assert "d" not in program.away()
    _core.unhold(other)


def test_pinned_units_keep_their_place_by_last_use(program: Program) -> None:
    for name in "abcd":
        program.take(name)
    program.op("b")
    program.op("a")
    number = _core.hold([(program.at["a"], 4 * MIB)], "pin", ["a"])
    _core.sleep(ALL, False)
    _core.wake(ALL, 0)
    _core.unhold(number)
    for budget, away in ((12, "c"), (8, "cd")):
        _core.set_budget(budget * MIB, 0)
        assert program.away() == set(away)


def test_unknown_tags_and_no_runtime(program: Program) -> None:
    with pytest.raises(ConfigError, match="unknown tag 'weights'"):
        _core.sleep(["weights"], False)
    program.clear()
    for call in (lambda: _core.sleep(ALL, False), lambda: _core.wake(ALL, 0)):
        with pytest.raises(StateError, match=r"umem\.enable"):
            call()


def test_both_ways_take_the_links_time() -> None:
    """In virtual time, within 1.2 of bytes over bandwidth."""
    with running(options(64 * PAGE, policy="lru")) as program:
        (profile,) = (row for row in _core.profiles() if row["name"] == "a100-pcie4")
        nbytes = 30 * 4 * MIB
        for i in range(30):
            program.take(str(i))
        begin = _core_testing.now_us()
        _core.sleep(ALL, False)
        asleep = _core_testing.now_us()
        assert 1 <= (asleep - begin) / (nbytes / profile["gb_per_s_out"] / 1e3) < 1.2
        _core.wake(ALL, 0)
        assert _core_testing.cuCtxSynchronize() == 0
        awake = _core_testing.now_us()
        assert 1 <= (awake - asleep) / (nbytes / profile["gb_per_s_in"] / 1e3) < 1.2


def test_blocks_in_pieces() -> None:
    with running(options(64 * PAGE, policy="lru", piece_bytes=4 * MIB)) as program:
        program.take("large", 22)
        number, given_back, _ = _core.sleep(ALL, False)
        assert given_back == 22 * MIB
        assert free_pages() == 64
        assert _core.wake(ALL, number) == 22 * MIB


@pytest.mark.parametrize("host_budget", [0, 8 * MIB])
def test_pages_between_two_lives_are_given_back(host_budget: int) -> None:
    """A static layout with another block; the host's memory only fits that one."""
    limited = options(FRAMES * PAGE, host_budget_bytes=host_budget)
    with running(limited) as program:
        sizes = np.array([8 * MIB, 8 * MIB], np.int64)
        _core.install_layout(sizes, np.array([0, 8 * MIB], np.int64), 16 * MIB)
        program.take("a", 8)
        program.take("b", 8)
        program.drop("b")
        assert _core.stats()["resident_bytes"] == 16 * MIB
        _, given_back, _ = _core.sleep(ALL, False)
        assert given_back == 16 * MIB
        stats = _core.stats()
        assert stats["resident_bytes"] == 0
        assert free_pages() == FRAMES - (4 if host_budget else 0)
        assert stats["host_bytes"] == (8 if host_budget else 16) * MIB
        assert _core.wake(ALL, 0) == 8 * MIB
        program.check("a")
        program.take("b", 8)
        program.op("a", "b")
        assert _core.stats()["bytes_in"] == 8 * MIB  # of a
    assert _core.stats()["host_bytes"] == 0


def test_an_idle_layout_goes_with_what_is_cached(program: Program) -> None:
    _core.install_layout(np.array([8 * MIB], np.int64), np.array([0], np.int64), 8 * MIB)
    program.take("a", 8)
    program.drop("a")
    _core.sleep(ALL, False)
    assert free_pages() == FRAMES
    assert _core.layout_status()["entries"] == 0


def test_threads_compute_while_another_sleeps(program: Program) -> None:
    for name in "abcd":
        program.take(name)
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            token = _core.op_begin([program.at["a"]], "", "forward")
            _core.op_end(token, "")
            time.sleep(1e-4)  # between ops the other thread may sleep

    thread = threading.Thread(target=compute)
    thread.start()
    slept = 0
    deadline = time.monotonic() + 60
    try:
        while slept < 100 and time.monotonic() < deadline:
            try:
                _core.sleep(ALL, False)
                slept += 1
            except StateError:
                time.sleep(1e-5)  # an op runs: yield so that its thread can end it
            _core.wake(ALL, 0)
    finally:
        stop.set()
        thread.join()
    assert slept > 0
    assert program.away() == set()


@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(seed=st.integers(0, 1 << 30), policy=st.sampled_from(["lru", "planned", "none"]))
def test_whatever_happens_contents_stay(seed: int, policy: str) -> None:
    """All except discarded ones, which are rewritten."""
    chance = random.Random(seed)
    holds: list[int] = []
    with running(options(8 * PAGE, policy=policy)) as program:
        for step in range(40):
            names = list(program.at)
            act = chance.choice(
                ["take", "drop", "op", "sleep", "sleep", "wake", "lose", "pin", "unpin"]
            )
            if act == "take" and len(names) < 6:
                tag = chance.choice(["param", "grad"])
                name = f"{tag}{step}"
                _core.tag(program.take(name, chance.choice([2, 4, 6])), tag)
            elif act == "drop" and names:
                program.drop(chance.choice(names))
            elif act == "op" and names:
                program.op(*chance.sample(names, min(2, len(names))))
            elif act == "sleep":
                _core.sleep(chance.choice([ALL, ["param"], ["grad"]]), False)
            elif act == "wake":
                _core.wake(chance.choice([ALL, ["param"]]), 0)
            elif act == "pin" and names:
                name = chance.choice(names)
                with contextlib.suppress(OutOfMemoryError):
                    span = (program.at[name], program.bytes[name])
                    holds.append(_core.hold([span], "pin", [name]))
            elif act == "unpin" and holds:
                _core.unhold(holds.pop())
            elif act == "lose":
                _core.sleep(["grad"], True)
                for name in names:
                    if name.startswith("grad"):
                        program.fill(name)
            for name in program.at:
                if chance.random() < 0.2:
                    program.check(name)
        assert _core.stats()["hook_errors"] == 0
        _core.wake(ALL, 0)
        assert _core.stats()["asleep_bytes"] == 0
