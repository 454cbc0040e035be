"""The runtime without torch: allocation, budget, eviction, hints, errors."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Iterator

import _core_testing
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from umem import _core
from umem.errors import ConfigError, DriverError, OutOfMemoryError, StateError

MIB = 1 << 20
PAGE = 2 * MIB
FLOOR = 8 * MIB


def options(budget: int = 32 * MIB, **changes: object) -> _core.Options:
    made = _core.Options()
    made.budget_bytes = budget
    made.floor_bytes = FLOOR
    made.min_swap_bytes = PAGE
    made.profile = "a100-pcie4"
    for name, value in changes.items():
        setattr(made, name, value)
    return made


class Blocks:
    """Live blocks by address, freed at the end of the test."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}

    def take(self, nbytes: int) -> int:
        ptr = _core.allocate(nbytes)
        self.live[ptr] = nbytes
        return ptr

    def drop(self, ptr: int) -> None:
        del self.live[ptr]
        assert _core.release(ptr)

    def clear(self) -> None:
        for ptr in list(self.live):
            self.drop(ptr)


@pytest.fixture
def blocks() -> Iterator[Blocks]:
    held = Blocks()
    yield held
    held.clear()
    _core.stop()


def state_of(ptr: int) -> str:
    for row in _core_testing.blocks():
        if row["base"] <= ptr < row["base"] + row["bytes"]:
            return str(row["state"])
    raise AssertionError("no such block")


def use(*ptrs: int) -> None:
    token = _core.op_begin(list(ptrs), "", "forward")
    for ptr in ptrs:
        _core_testing.load(ptr, 1)
    _core.op_end(token, "")


def test_memory_is_aligned_and_distinct(blocks: Blocks) -> None:
    _core.start(options())
    ptrs = [blocks.take(n) for n in (1, 255, 256, 257, 5000, PAGE - 1, PAGE, PAGE + 1, 9 * MIB)]
    assert all(ptr % 256 == 0 for ptr in ptrs)
    assert all(ptr % PAGE == 0 for ptr in ptrs[-3:])
    spans = sorted((ptr, ptr + n) for ptr, n in blocks.live.items())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_neighbours_that_are_free_serve_a_larger_block(blocks: Blocks) -> None:
    _core.start(options())
    page = [blocks.take(256 << 10) for _ in range(8)]
    assert len({ptr // PAGE for ptr in page}) == 1
    for ptr in sorted(page)[:-1]:
        blocks.drop(ptr)
    assert blocks.take(1536 << 10) // PAGE == page[0] // PAGE


def test_zero_bytes_are_no_memory(blocks: Blocks) -> None:
    _core.start(options())
    assert _core.allocate(0) == 0
    assert not _core.release(0)


def test_release_of_what_is_not_a_block(blocks: Blocks) -> None:
    _core.start(options())
    ptr = blocks.take(4 * MIB)
    assert not _core.release(ptr + 256)
    assert not _core.release(0x1234)
    blocks.drop(ptr)
    assert not _core.release(ptr)


@pytest.mark.parametrize("policy", ["none", "lru", "conv_lru"])
def test_four_times_the_budget_keeps_its_bytes(blocks: Blocks, policy: str) -> None:
    _core.start(options(16 * MIB, policy=policy))
    ptrs = [blocks.take(4 * MIB) for _ in range(16)]
    for index, ptr in enumerate(ptrs):
        token = _core.op_begin([ptr], "conv", "forward")
        _core_testing.store(ptr, b"block%02d" % index)
        _core_testing.store(ptr + 4 * MIB - 7, b"block%02d" % index)
        _core.op_end(token, "activation")
    for index, ptr in enumerate(ptrs):
        use(ptr)
        assert _core_testing.load(ptr, 7) == b"block%02d" % index
        assert _core_testing.load(ptr + 4 * MIB - 7, 7) == b"block%02d" % index
    stats = _core.stats()
    assert stats["peak_resident_bytes"] <= 16 * MIB
    assert stats["bytes_out"] > 0
    assert (stats["faults"] > 0) == (policy == "none")


def test_lru_sends_out_what_was_used_longest_ago(blocks: Blocks) -> None:
    _core.start(options(16 * MIB))
    a, b, c, d = (blocks.take(4 * MIB) for _ in range(4))
    use(a)
    blocks.take(4 * MIB)
    assert [state_of(p) for p in (a, b, c, d)] == ["device", "host", "device", "device"]


def test_conv_lru_sends_out_conv_activations_first(blocks: Blocks) -> None:
    _core.start(options(16 * MIB, policy="conv_lru"))
    params = blocks.take(4 * MIB)

    def output(family: str) -> int:
        token = _core.op_begin([], family, "forward")
        ptr = blocks.take(4 * MIB)
        _core.op_end(token, "activation")
        return ptr

    norm, conv, relu = output("norm"), output("conv"), output("elementwise")
    blocks.take(4 * MIB)
    assert [state_of(p) for p in (params, norm, conv, relu)] == [
        "device",
        "device",
        "host",
        "device",
    ]
    blocks.take(4 * MIB)  # no conv activation is left: the oldest leaves instead of a failure
    assert state_of(params) == "host"


def test_dead_bytes_do_not_travel(blocks: Blocks) -> None:
    _core.start(options(16 * MIB))
    dead = [blocks.take(4 * MIB) for _ in range(3)]
    for ptr in dead:
        blocks.drop(ptr)
    blocks.take(12 * MIB)  # of another size: the cached blocks must be released
    stats = _core.stats()
    assert stats["bytes_out"] == 0
    assert stats["bytes_discarded"] >= 8 * MIB


def test_a_freed_block_is_reused_in_place(blocks: Blocks) -> None:
    _core.start(options())
    ptr = blocks.take(4 * MIB)
    prefetches = _core_testing.telemetry()
    blocks.drop(ptr)
    assert blocks.take(4 * MIB - 5) == ptr
    assert _core_testing.telemetry() == prefetches


def test_an_evicted_dead_block_is_reused_without_a_copy(blocks: Blocks) -> None:
    _core.start(options(16 * MIB))
    ptr = blocks.take(4 * MIB)
    _core.evict(ptr, 1)
    blocks.drop(ptr)
    before = _core.stats()
    assert blocks.take(4 * MIB) == ptr
    after = _core.stats()
    assert after["bytes_in"] == before["bytes_in"]
    assert after["faults"] == before["faults"]


def test_inputs_are_brought_before_the_op_runs(blocks: Blocks) -> None:
    _core.start(options(16 * MIB))
    ptrs = [blocks.take(4 * MIB) for _ in range(8)]
    faults = _core.stats()["faults"]
    for ptr in ptrs * 3:
        use(ptr)
    assert _core.stats()["faults"] == faults
    assert _core.stats()["prefetches"] > 0


def test_units_in_use_stay(blocks: Blocks) -> None:
    _core.start(options(16 * MIB))
    a, b = blocks.take(4 * MIB), blocks.take(4 * MIB)
    token = _core.op_begin([a, b], "", "forward")
    for _ in range(4):
        blocks.take(4 * MIB)
        assert state_of(a) == state_of(b) == "device"
    with pytest.raises(StateError, match="in use"):
        _core.evict(a, 1)
    _core.op_end(token, "")
    assert all(row["pins"] == 0 for row in _core_testing.blocks())


def test_an_op_that_needs_more_than_the_budget_works_by_faults(blocks: Blocks) -> None:
    _core.start(options(16 * MIB))
    ptrs = [blocks.take(4 * MIB) for _ in range(8)]
    for index, ptr in enumerate(ptrs):
        _core_testing.store(ptr, bytes([index]))
    token = _core.op_begin(ptrs, "", "forward")
    for _ in range(3):
        for index, ptr in enumerate(ptrs):
            assert _core_testing.load(ptr, 1) == bytes([index])
    _core.op_end(token, "")
    assert _core.stats()["peak_resident_bytes"] <= 16 * MIB
    faults = _core.stats()["faults"]
    for ptr in ptrs * 2:  # and the ledger is right again afterwards
        use(ptr)
    assert _core.stats()["faults"] == faults


def test_a_block_larger_than_the_budget_works_and_warns_once(
    blocks: Blocks, capfd: pytest.CaptureFixture[str]
) -> None:
    _core.start(options(16 * MIB))
    for _ in range(2):
        ptr = blocks.take(40 * MIB)
        token = _core.op_begin([ptr], "", "forward")
        _core_testing.touch(ptr, 40 * MIB)
        _core_testing.store(ptr + 39 * MIB, b"end")
        _core.op_end(token, "activation")
        assert _core_testing.load(ptr + 39 * MIB, 3) == b"end"
        blocks.drop(ptr)
    assert capfd.readouterr().err.count("larger than the budget") == 1
    assert _core.stats()["peak_resident_bytes"] <= 16 * MIB


def five_pages_in_four(blocks: Blocks) -> list[int]:
    """Blocks of a page each, with `part` behind their first bytes, on a device that lacks one."""
    _core.start(options(8 * MIB))
    parts = [blocks.take(PAGE) for _ in range(5)]
    for part in parts:
        _core_testing.store(part + 8, b"part")
    return parts


def test_an_op_that_goes_around_too_many_pages_leaves_on_the_host_what_does_not_fit(
    blocks: Blocks, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a reduction over the slowest dimension."""
    parts = five_pages_in_four(blocks)
    for n in (1, 2):  # each op starts over
        before = _core.stats()["faults"]
        token = _core.op_begin(parts, "", "forward", "strided")
        for part in parts * 50:
            _core_testing.touch(part, 2 * MIB)
            _core_testing.store(part + 8 + n, b"%d" % n)
        _core.op_end(token, "activation")
        assert 5 < _core.stats()["faults"] - before <= 3 * 5
        assert _core.stats()["zero_copy_bytes"] == PAGE * n
        assert _core.stats()["peak_resident_bytes"] <= 8 * MIB
    assert all(_core_testing.load(part + 8, 4) == b"p12t" for part in parts)
    by_operator = _core.faults_by_operator()
    assert by_operator[0][0] == "strided"
    assert sum(count for _, count in by_operator) <= _core.stats()["faults"]
    assert by_operator[0][1] >= 2 * 5
    said = capfd.readouterr().err
    assert said.count("warning") == 1
    assert "strided needs 10.0 MiB at once" in said
    assert "A budget of 10.0 MiB ends that" in said
    for part in parts:
        token = _core.op_begin([part], "", "forward", "small")
        _core_testing.touch(part, 2 * MIB)
        _core.op_end(token, "activation")
        assert _core_testing.page_states(part, 2 * MIB) == ["device"]


def test_code_between_two_ops_that_goes_around_too_many_pages_is_named(
    blocks: Blocks, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = five_pages_in_four(blocks)

    def one_op() -> None:
        token = _core.op_begin(parts[:1], "", "forward", "small")
        _core.op_end(token, "activation")

    one_op()
    before = _core.stats()["faults"]
    for part in parts * 50:
        _core_testing.touch(part, 2 * MIB)
    assert _core.stats()["faults"] - before <= 3 * 5
    one_op()
    said = capfd.readouterr().err
    assert said.count("code between two operators repeatedly touched more memory") == 1
    assert all(_core_testing.load(part + 8, 4) == b"part" for part in parts)


def test_the_share_of_small_blocks_is_that_at_the_peak(blocks: Blocks) -> None:
    _core.start(options(16 * MIB))
    small = [blocks.take(MIB) for _ in range(3)]
    large = blocks.take(4 * MIB)
    assert (_core.stats()["peak_live_bytes"], _core.stats()["peak_small_bytes"]) == (
        7 * MIB,
        3 * MIB,
    )
    blocks.drop(large)
    small.append(blocks.take(MIB))  # no new peak
    assert _core.stats()["peak_small_bytes"] == 3 * MIB
    _core.reset_peak_stats()
    assert _core.stats()["peak_small_bytes"] == _core.stats()["peak_live_bytes"] == 4 * MIB


def test_pages_that_fault_once_an_op_never_thrash(blocks: Blocks) -> None:
    """As under the driver alone, where each op brings by faults what others have sent out."""
    _core.start(options(8 * MIB, policy="none"))
    ptrs = [blocks.take(2 * MIB) for _ in range(6)]
    for ptr in ptrs * 20:
        token = _core.op_begin([ptr], "", "forward")
        _core_testing.touch(ptr, 2 * MIB)
        _core.op_end(token, "")
    assert _core.stats()["zero_copy_bytes"] == 0
    assert _core.stats()["faults"] >= 6 * 20


def test_an_op_above_the_budget_is_counted_and_named_once(
    blocks: Blocks, capfd: pytest.CaptureFixture[str]
) -> None:
    _core.start(options(16 * MIB))
    ptrs = [blocks.take(4 * MIB) for _ in range(6)]
    fits = _core.op_begin(ptrs[:4], "", "forward", "fits")
    _core.op_end(fits, "")
    assert _core.stats()["ops_above_budget"] == 0
    for count in (1, 2):
        token = _core.op_begin(ptrs, "", "forward", "too_much")
        _core.op_end(token, "")
        assert _core.stats()["ops_above_budget"] == count
    said = capfd.readouterr().err
    assert said.count("warning: too_much needs 24.0 MiB at once, which is larger than") == 1
    assert "fits" not in said


def test_what_an_op_makes_counts_with_what_it_and_the_ops_around_it_are_given(
    blocks: Blocks, capfd: pytest.CaptureFixture[str]
) -> None:
    _core.start(options(16 * MIB))
    ptrs = [blocks.take(4 * MIB) for _ in range(3)]
    outer = _core.op_begin(ptrs, "", "forward", "outer")
    inner = _core.op_begin(ptrs[:1], "", "forward", "inner")
    blocks.take(4 * MIB)
    assert _core.stats()["ops_above_budget"] == 0
    blocks.take(4 * MIB)
    blocks.take(4 * MIB)
    _core.op_end(inner, "")
    _core.op_end(outer, "")
    assert _core.stats()["ops_above_budget"] == 1
    assert "warning: inner needs 20.0 MiB at once" in capfd.readouterr().err


def test_pins_that_leave_too_little_make_no_op_too_large(
    blocks: Blocks, capfd: pytest.CaptureFixture[str]
) -> None:
    _core.start(options(16 * MIB))
    ptrs = [blocks.take(4 * MIB) for _ in range(5)]
    held = _core.hold([(ptr, 4 * MIB) for ptr in ptrs[:2]], "pin", ["a", "b"])
    token = _core.op_begin(ptrs[2:], "", "forward", "fits_alone")
    _core.op_end(token, "")
    _core.unhold(held)
    assert _core.stats()["ops_above_budget"] == 0
    assert "fits_alone" not in capfd.readouterr().err


def test_out_of_memory_lists_the_holders(blocks: Blocks) -> None:
    _core.start(options(16 * MIB, host_budget_bytes=16 * MIB))
    for nbytes in (10 * MIB, 8 * MIB, 6 * MIB, 2 * MIB):
        blocks.take(nbytes)
    with pytest.raises(OutOfMemoryError) as caught:
        _core.allocate(12 * MIB)
    text = str(caught.value)
    for part in (
        "asked for 12.0 MiB",
        "budget 16.0 MiB",
        "resident",
        "evictable",
        "host",
        "of 16.0 MiB",
        "10.0 MiB",
        "8.0 MiB",
        "6.0 MiB",
    ):
        assert part in text
    assert _core.stats()["ooms"] == 1
    assert blocks.take(4 * MIB)  # smaller requests still work
    assert _core.stats()["peak_host_bytes"] <= 16 * MIB


def test_budget_changes_both_ways(blocks: Blocks) -> None:
    _core.start(options(32 * MIB))
    ptrs = [blocks.take(4 * MIB) for _ in range(8)]
    for index, ptr in enumerate(ptrs):
        _core_testing.store(ptr, bytes([index]))
    _core.set_budget(12 * MIB, 0)
    assert _core.stats()["resident_bytes"] <= 12 * MIB
    _core.reset_peak_stats()
    for ptr in ptrs * 2:
        use(ptr)
    assert _core.stats()["peak_resident_bytes"] <= 12 * MIB
    _core.set_budget(64 * MIB, 0)
    for ptr in ptrs:
        use(ptr)
    moved = _core.stats()["bytes_in"]
    for index, ptr in enumerate(ptrs):
        use(ptr)
        assert _core_testing.load(ptr, 1) == bytes([index])
    assert _core.stats()["bytes_in"] == moved  # all of it fits now
    with pytest.raises(ConfigError, match="floor"):
        _core.set_budget(FLOOR - 1, 0)


def test_policy_can_change_at_run_time(blocks: Blocks) -> None:
    _core.start(options(16 * MIB, policy="none"))
    ptrs = [blocks.take(4 * MIB) for _ in range(8)]
    for number, policy in enumerate(("lru", "none", "conv_lru", "none")):
        values = [bytes([10 * number + index]) for index in range(len(ptrs))]
        for value, ptr in zip(values, ptrs, strict=True):
            token = _core.op_begin([ptr], "", "forward")
            _core_testing.store(ptr, value)
            _core.op_end(token, "")
        _core_testing.set_policy(policy)
        for value, ptr in zip(values, ptrs, strict=True):
            use(ptr)
            assert _core_testing.load(ptr, 1) == value
    assert _core.stats()["peak_resident_bytes"] <= 16 * MIB
    with pytest.raises(ConfigError, match="conv_lru"):
        _core_testing.set_policy("clever")


def test_a_policy_that_begins_to_evict_keeps_pins_and_the_host_budget(blocks: Blocks) -> None:
    _core.start(options(32 * MIB, policy="none", host_budget_bytes=8 * MIB))
    ptrs = [blocks.take(4 * MIB) for _ in range(5)]
    for ptr in ptrs:
        use(ptr)
    _core.hold([(ptrs[0], 4 * MIB)], "pin", ["x"])
    _core.hold([(ptrs[3], 4 * MIB)], "exempt", ["y"])
    _core_testing.set_policy("lru")
    stats = _core.stats()
    assert stats["host_bytes"] == 8 * MIB
    assert stats["resident_bytes"] == 12 * MIB
    resident = [_core.where(ptr, 1)["resident_bytes"] for ptr in ptrs]
    assert (resident[0], resident[3], sum(resident)) == (1, 1, 3)
    for index, ptr in enumerate(ptrs):
        use(ptr)
        _core_testing.store(ptr, bytes([index]))
    assert [bytes(_core_testing.load(ptr, 1))[0] for ptr in ptrs] == list(range(5))


def test_an_eviction_by_hand_keeps_the_host_budget_under_any_policy(blocks: Blocks) -> None:
    _core.start(options(32 * MIB, policy="none", host_budget_bytes=4 * MIB))
    first, second = blocks.take(4 * MIB), blocks.take(4 * MIB)
    _core.evict([(first, 1)])
    with pytest.raises(OutOfMemoryError, match="host budget"):
        _core.evict([(second, 1)])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_no_ops_of_other_threads(blocks: Blocks) -> None:
    _core.start(options())
    own, others = blocks.take(4 * MIB), blocks.take(4 * MIB)
    begun, forked = threading.Event(), threading.Event()

    def compute() -> None:
        token = _core.op_begin([others], "", "forward")
        begun.set()
        forked.wait()
        _core.op_end(token, "")

    thread = threading.Thread(target=compute)
    thread.start()
    begun.wait()
    token = _core.op_begin([own], "", "forward")
    child = os.fork()
    if child == 0:
        try:
            _core.evict([(others, 1)])
            with pytest.raises(StateError, match="in use"):
                _core.evict([(own, 1)])
            _core.op_end(token, "")
            _core.evict([(own, 1)])
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(StateError, match="in use"):
        _core.evict([(others, 1)])
    _core.op_end(token, "")
    forked.set()
    thread.join()


def test_start_again(blocks: Blocks) -> None:
    _core.start(options())
    _core.start(options())  # the same: a no-op
    with pytest.raises(StateError, match="other options"):
        _core.start(options(64 * MIB))
    ptr = blocks.take(4 * MIB)
    _core_testing.store(ptr, b"alive")
    _core.stop()
    with pytest.raises(StateError, match="not running"):
        _core.allocate(1)
    assert _core_testing.load(ptr, 5) == b"alive"
    with pytest.raises(StateError, match="still alive"):
        _core.start(options(profile="h200-pcie5"))
    _core.start(options(64 * MIB))  # another budget is fine
    assert _core_testing.load(ptr, 5) == b"alive"
    blocks.drop(ptr)
    _core.stop()
    _core.start(options(profile="h200-pcie5"))


def test_a_million_tiny_blocks(blocks: Blocks) -> None:
    _core.start(options(16 * MIB))
    ptrs = [_core.allocate(1 + i % 200) for i in range(200_000)]
    assert len(set(ptrs)) == len(ptrs)
    assert _core.stats()["live_bytes"] == 200_000 * 256
    random.Random(3).shuffle(ptrs)
    for ptr in ptrs:
        assert _core.release(ptr)
    assert _core.stats()["live_bytes"] == 0
    assert _core.stats()["peak_resident_bytes"] <= 16 * MIB


def test_changing_sizes_do_not_pile_up_ranges(blocks: Blocks) -> None:
    _core.start(options(32 * MIB))
    for step in range(200):
        blocks.drop(blocks.take((2 + step % 97) * MIB))
    stats = _core.stats()
    assert stats["cached_bytes"] <= 2 * stats["peak_live_bytes"] + 80 * MIB
    _core.trim()
    assert _core.stats()["cached_bytes"] == 0
    assert _core.stats()["resident_bytes"] == 0


def test_nothing_is_kept_once_nothing_lives(blocks: Blocks) -> None:
    """A program of one model after another starts each with the machine's memory."""
    _core.start(options(32 * MIB))
    for _ in range(2):
        model = [blocks.take(8 * MIB) for _ in range(16)]
        left, *most = model
        for ptr in most:
            blocks.drop(ptr)
        stats = _core.stats()
        assert stats["cached_bytes"] >= 120 * MIB  # for the next step
        assert stats["host_bytes"] > 0
        blocks.drop(left)
        stats = _core.stats()
        kept = ("cached_bytes", "resident_bytes", "host_bytes")
        assert [stats[name] for name in kept] == [0, 0, 0]


def test_what_two_whole_steps_have_no_use_for_is_given_back(blocks: Blocks) -> None:
    """A recorded step, or one of another shape, leaves ranges of that kind."""
    _core.start(options(96 * MIB))
    blocks.take(32 * MIB)

    def step(*sizes: int) -> int:
        taken = [blocks.take(size * MIB) for size in sizes]
        for ptr in taken:
            blocks.drop(ptr)
        _core.step()
        return int(_core.stats()["cached_bytes"]) // MIB

    assert step(10, 14, 6, 2) == 32
    assert [step(14) for _ in range(4)] == [32, 14, 14, 14]
    assert _core.stats()["resident_bytes"] == 46 * MIB
    assert step(10, 14) == 24


def test_dead_memory_that_serves_again_last_is_dropped_first(blocks: Blocks) -> None:
    """The oldest would be the next to serve: a step that exceeds the budget by little drops all."""
    _core.start(options(44 * MIB, min_swap_bytes=PAGE))
    sizes = (4, 6, 8, 10, 12, 14)  # together 54

    def step() -> int:
        before = _core.stats()["bytes_discarded"]
        for size in sizes:
            blocks.drop(blocks.take(size * MIB))
        _core.step()
        return int(_core.stats()["bytes_discarded"] - before) // MIB

    dropped = [step() for _ in range(6)]
    assert sum(dropped[2:]) <= 80  # of 216


@pytest.mark.parametrize(("before", "after"), [((16, 20), (5, 6, 7, 8)), ((30,), (4, 6, 8, 10))])
def test_dead_memory_of_a_phase_that_is_over_is_dropped_before_what_serves_still(
    blocks: Blocks, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    """As after an evaluation with other shapes: the time when its memory would serve is past."""
    _core.start(options(44 * MIB, min_swap_bytes=PAGE))

    def dropped(sizes: tuple[int, ...]) -> int:
        earlier = _core.stats()["bytes_discarded"]
        for size in sizes:
            blocks.drop(blocks.take(size * MIB))
        return int(_core.stats()["bytes_discarded"] - earlier)

    assert [dropped(before) for _ in range(4)] == [0] * 4
    assert sum(dropped(after) for _ in range(2)) > 0
    assert [dropped(after) for _ in range(4)] == [0] * 4


def test_the_guard_bounds_managed_memory(blocks: Blocks) -> None:
    _core.start(options(16 * MIB, device_bytes=32 * MIB, guard=True))
    blocks.take(16 * MIB)
    blocks.drop(blocks.take(10 * MIB))
    blocks.take(12 * MIB)  # the cached range was released first
    with pytest.raises(OutOfMemoryError, match="UMEM_GUARD"):
        _core.allocate(8 * MIB)


def test_hints(blocks: Blocks) -> None:
    _core.start(options(16 * MIB))
    ptr = blocks.take(4 * MIB)
    _core.evict(ptr, 4 * MIB)
    assert state_of(ptr) == "host"
    _core.prefetch(ptr, 4 * MIB)
    assert state_of(ptr) == "device"
    _core.evict(ptr, 1)  # fetched needlessly
    assert _core.stats()["prefetched_unused_bytes"] == 4 * MIB
    with pytest.raises(ConfigError, match="not in memory"):
        _core.prefetch(0x1000, 10)


def test_scratch_freed_inside_its_op_stays_until_the_op_ends(blocks: Blocks) -> None:
    _core.start(options(32 * MIB))
    token = _core.op_begin([], "conv", "forward")
    scratch = _core.allocate(4 * MIB)
    assert _core.release(scratch)
    _core.trim()  # releases all memory that no op uses
    assert [row["pins"] for row in _core_testing.blocks() if row["base"] == scratch] == [1]
    other = blocks.take(8 * MIB)
    _core.op_end(token, "")
    assert [row["pins"] for row in _core_testing.blocks() if row["base"] == other] == [0]
    _core.trim()
    assert scratch not in {row["base"] for row in _core_testing.blocks()}


def test_disabling_inside_an_op_that_used_scratch(blocks: Blocks) -> None:
    _core.start(options(32 * MIB))
    token = _core.op_begin([], "conv", "forward")
    assert _core.release(_core.allocate(4 * MIB))
    _core.stop()
    _core.op_end(token, "")
    _core.start(options(16 * MIB, device_bytes=16 * MIB))  # another device: the first one is closed
    assert _core.stats()["budget_bytes"] == 16 * MIB


def test_host_memory_of_dead_blocks_makes_room_for_a_large_one(blocks: Blocks) -> None:
    _core.start(options(16 * MIB, host_budget_bytes=32 * MIB))
    first = _core.allocate(20 * MIB)  # by faults: some of it on the host
    _core_testing.store(first, bytes([1]) * (20 * MIB))
    _core.evict(first, 20 * MIB)
    assert _core.release(first)
    again = blocks.take(24 * MIB)  # the dead block's host memory is released first
    _core_testing.store(again, bytes([2]) * (24 * MIB))
    assert _core_testing.load(again + 24 * MIB - 1, 1) == bytes([2])


@pytest.mark.parametrize("size", [36, 40])
def test_a_dead_block_that_serves_again_has_its_host_memory_already(
    blocks: Blocks, size: int
) -> None:
    _core.start(options(16 * MIB, host_budget_bytes=64 * MIB))
    first = _core.allocate(size * MIB)
    assert _core.release(first)
    blocks.take(36 * MIB)


def test_what_is_read_mostly_is_evicted_again_without_a_transfer(blocks: Blocks) -> None:
    _core.start(options(16 * MIB))
    ptr = blocks.take(4 * MIB)
    _core_testing.store(ptr, bytes([7]) * (4 * MIB))

    def evicting_moves() -> int:
        before = _core.stats()["bytes_out"]
        _core.evict(ptr, 4 * MIB)
        return int(_core.stats()["bytes_out"] - before)

    assert evicting_moves() == 4 * MIB
    _core.read_mostly(ptr, 4 * MIB, True)
    for _ in range(2):
        _core.prefetch(ptr, 4 * MIB)
        assert _core_testing.load(ptr, 1) == bytes([7])
        assert evicting_moves() == 0
    _core.prefetch(ptr, 4 * MIB)
    _core_testing.store(ptr, bytes([8]) * (4 * MIB))  # the host's copy is stale now
    assert evicting_moves() == 4 * MIB
    _core.read_mostly(ptr, 4 * MIB, False)
    _core.prefetch(ptr, 4 * MIB)
    assert _core_testing.load(ptr + 4 * MIB - 1, 1) == bytes([8])
    assert evicting_moves() == 4 * MIB


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_allocates_and_evicts_on_its_own(blocks: Blocks) -> None:
    _core.start(options(16 * MIB))
    ptrs = [blocks.take(4 * MIB) for _ in range(8)]
    for index, ptr in enumerate(ptrs):
        _core_testing.store(ptr, bytes([index]))
    child = os.fork()
    if child == 0:
        good = all(_core_testing.load(ptr, 1) == bytes([i]) for i, ptr in enumerate(ptrs))
        more = [_core.allocate(4 * MIB) for _ in range(8)]
        for ptr in more + ptrs:
            _core_testing.store(ptr, b"child")
        good &= all(_core.release(ptr) for ptr in more + ptrs)
        os._exit(0 if good else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert [_core_testing.load(ptr, 1)[0] for ptr in ptrs] == list(range(8))


@pytest.mark.parametrize(
    "entry",
    [
        "cuMemAllocManaged",
        "cuMemPrefetchBatchAsync",
        "cuMemDiscardBatchAsync",
        "cuMemDiscardAndPrefetchBatchAsync",
        "cuEventRecord",
        "cuStreamWaitEvent",
    ],
)
def test_a_failing_driver_call_loses_no_data(blocks: Blocks, entry: str) -> None:
    _core.start(options(16 * MIB))
    _core_testing.instrument()
    values: dict[int, int] = {}
    try:
        for round_ in range(60):
            _core_testing.inject(entry, 1 + round_ % 5, 999)
            try:
                ptr = blocks.take((4 + 2 * (round_ % 3)) * MIB)
                values[ptr] = round_ % 256
                _core_testing.store(ptr, bytes([values[ptr]]))
            except Exception as error:  # noqa: BLE001 - which one is not the point here
                assert "CUDA_ERROR_UNKNOWN" in str(error)  # noqa: PT017
            for at, value in values.items():
                use(at)
                assert _core_testing.load(at, 1) == bytes([value])
            if len(values) > 4:  # the oldest (evicted) and the newest (resident) in turn
                gone = list(values)[-(round_ % 2)]
                del values[gone]
                blocks.drop(gone)
    finally:
        _core_testing.clear_injections()
    for at, value in values.items():
        use(at)
        assert _core_testing.load(at, 1) == bytes([value])
    assert _core_testing.calls(entry) > 5  # it was really in the way


def test_what_the_driver_did_not_send_out_is_still_there(blocks: Blocks) -> None:
    _core.start(options())
    _core_testing.instrument()
    ptr = blocks.take(4 * MIB)
    before = _core.stats()["resident_bytes"]
    _core_testing.inject("cuMemPrefetchBatchAsync", 1, 999)
    with pytest.raises(DriverError, match="CUDA_ERROR_UNKNOWN"):
        _core.evict(ptr, 1)
    _core_testing.clear_injections()
    assert state_of(ptr) == "device"
    assert _core.stats()["resident_bytes"] == before
    _core.evict(ptr, 1)
    assert state_of(ptr) == "host"


def ledger_bytes() -> int:
    return sum(row["bytes"] for row in _core_testing.blocks() if row["state"] in ("device", "dead"))


def test_blocks_of_other_streams_wait_for_them(blocks: Blocks) -> None:
    _core.start(options())
    ptr = blocks.take(4 * MIB)
    _, stream = _core_testing.cuStreamCreate(1)
    assert _core.record_stream(ptr, stream)
    assert not _core.record_stream(0x1000, stream)
    _core_testing.launch(stream, 1000.0)  # work that takes a millisecond of virtual time
    blocks.drop(ptr)
    assert blocks.take(4 * MIB) != ptr
    _core_testing.cuStreamSynchronize(stream)
    assert blocks.take(4 * MIB) == ptr


def test_stop_waits_for_blocks_of_other_streams(blocks: Blocks) -> None:
    _core.start(options())
    ptr = blocks.take(4 * MIB)
    _, stream = _core_testing.cuStreamCreate(1)
    _core.record_stream(ptr, stream)
    _core_testing.launch(stream, 1e6)
    blocks.drop(ptr)
    _core.stop()
    _core.start(options(profile="h200-pcie5"))  # the device was closed


def test_a_refused_block_leaves_the_accounts_right(blocks: Blocks) -> None:
    _core.start(options(64 * MIB, host_budget_bytes=40 * MIB))
    blocks.drop(blocks.take(36 * MIB))  # dead, its frames still held
    blocks.take(10 * MIB)
    with pytest.raises(OutOfMemoryError):
        _core.allocate(100 * MIB)
    assert ledger_bytes() == _core.stats()["resident_bytes"]
    assert _core.stats()["cached_bytes"] <= PAGE  # neither the refused nor the dead range
    blocks.drop(blocks.take(36 * MIB))
    _core_testing.instrument()
    _core_testing.inject("cuMemDiscardBatchAsync", 1, 999)
    try:
        with pytest.raises(Exception, match="CUDA_ERROR_UNKNOWN"):
            _core.allocate(34 * MIB)  # reuses the dead range, at another size
    finally:
        _core_testing.clear_injections()
    assert ledger_bytes() == _core.stats()["resident_bytes"]


def test_dead_blocks_go_without_discard_support_too(blocks: Blocks) -> None:
    not_found = 500
    _core.start(options(16 * MIB))
    _core_testing.instrument()
    try:
        for entry in ("cuMemDiscardBatchAsync", "cuMemDiscardAndPrefetchBatchAsync"):
            for nth in range(1, 50):
                _core_testing.inject(entry, nth, not_found)
        blocks.drop(blocks.take(12 * MIB))
        kept = [blocks.take(6 * MIB), blocks.take(8 * MIB)]
        assert [state_of(ptr) for ptr in kept] == ["device", "device"]
        for ptr in kept * 2:
            use(ptr)
        assert _core.stats()["faults"] == 0
        assert _core.stats()["bytes_out"] == 12 * MIB  # as if it were live: decision 0012
    finally:
        _core_testing.clear_injections()


def test_the_ledger_is_right_after_a_time_without_policy(blocks: Blocks) -> None:
    _core.start(options(16 * MIB, device_bytes=64 * MIB, policy="none"))
    ptrs = [blocks.take(4 * MIB) for _ in range(10)]
    for ptr in ptrs:
        _core_testing.touch(ptr, 4 * MIB)
    blocks.drop(ptrs.pop())
    _core_testing.set_policy("lru")
    assert _core.stats()["resident_bytes"] <= 16 * MIB
    for ptr in ptrs:
        use(ptr)
    assert ledger_bytes() == _core.stats()["resident_bytes"] <= 16 * MIB


def test_a_nearly_full_segment_takes_no_blocks_after_the_step(blocks: Blocks) -> None:
    _core.start(options())
    size = PAGE // 8
    kept = [blocks.take(size) for _ in range(8)]
    assert len({ptr // PAGE for ptr in kept}) == 1
    blocks.drop(kept[7])
    assert blocks.take(size) == kept[7]  # within the step
    blocks.drop(kept[7])
    _core.step()
    other = blocks.take(size)
    assert other // PAGE != kept[0] // PAGE  # the blocks of later steps lie by themselves
    for ptr in kept[5:7]:
        blocks.drop(ptr)  # more than a quarter of it is free
    assert blocks.take(size) == kept[5]


def test_a_segment_that_was_away_stays_once_used(blocks: Blocks) -> None:
    _core.start(options(16 * MIB))
    small = blocks.take(1000)
    _core.evict(small, 1)
    moved = _core.stats()["bytes_out"]
    for _ in range(5):
        token = _core.op_begin([], "", "forward")
        inner = blocks.take(1000)
        _core_testing.store(inner, b"x")
        _core.op_end(token, "temp")
        blocks.drop(inner)
    assert _core.stats()["faults"] == 0
    assert _core.stats()["bytes_out"] == moved


def test_host_memory_of_dead_ranges_is_given_back_when_short(blocks: Blocks) -> None:
    _core.start(options(16 * MIB, host_budget_bytes=24 * MIB))
    for mib in (6, 8, 10):
        ptr = blocks.take(mib * MIB)
        _core.evict(ptr, 1)
        blocks.drop(ptr)
    assert _core.stats()["host_bytes"] == 24 * MIB
    kept = [blocks.take(12 * MIB), blocks.take(12 * MIB)]
    for ptr in kept:
        use(ptr)
    assert _core.stats()["faults"] == 0
    assert _core.stats()["host_bytes"] <= 24 * MIB


def test_peaks_can_be_reset_without_a_cost(blocks: Blocks) -> None:
    _core.start(options(64 * MIB))
    ptrs = [blocks.take(30 * MIB), blocks.take(20 * MIB)]
    _core.evict(ptrs[0], 1)
    assert _core.stats()["peak_host_bytes"] == 30 * MIB
    blocks.clear()
    cached = _core.stats()["cached_bytes"]
    _core.reset_peak_stats()
    blocks.drop(blocks.take(4 * MIB))
    assert _core.stats()["cached_bytes"] == cached + 4 * MIB
    assert _core.stats()["peak_live_bytes"] == 4 * MIB


def test_the_guard_counts_small_blocks_and_keeps_the_cache(blocks: Blocks) -> None:
    _core.start(options(16 * MIB, device_bytes=32 * MIB, guard=True))
    for _ in range(16):
        blocks.take(2 * MIB - 300)
    with pytest.raises(OutOfMemoryError, match="UMEM_GUARD"):
        _core.allocate(2 * MIB - 300)
    _core_testing.instrument()
    for ptr in list(blocks.live)[:4]:
        blocks.drop(ptr)
    for _ in range(4):
        blocks.take(2 * MIB - 300)
    assert _core_testing.calls("cuMemAllocManaged") == 0


def test_an_op_goes_on_after_one_inside_it(blocks: Blocks) -> None:
    _core.start(options())
    outer = _core.op_begin([], "", "forward")
    _core.op_end(_core.op_begin([], "", "forward"), "")
    ptr = blocks.take(4 * MIB)
    assert [row["pins"] for row in _core_testing.blocks() if row["base"] == ptr] == [1]
    _core.op_end(outer, "")
    assert [row["pins"] for row in _core_testing.blocks() if row["base"] == ptr] == [0]


def test_ops_may_end_out_of_order_but_not_elsewhere(blocks: Blocks) -> None:
    _core.start(options())
    ptr = blocks.take(4 * MIB)
    outer = _core.op_begin([ptr], "", "forward")
    inner = _core.op_begin([ptr], "", "forward")
    _core.op_end(outer, "")
    blocks.take(100)
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            _core.op_end(inner, "")
        except StateError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(caught) == 1
    _core.op_end(inner, "")
    assert all(row["pins"] == 0 for row in _core_testing.blocks())
    with pytest.raises(StateError, match="open_soft"):
        _core_testing.close()


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["take", "drop", "use", "evict", "prefetch", "budget", "policy", "trim"]),
        st.integers(1, 9 * MIB),
        st.integers(0, 10_000),
    ),
    max_size=80,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_no_sequence_loses_bytes_or_exceeds_the_budget(
    blocks: Blocks, actions: list[tuple[str, int, int]]
) -> None:
    _core.start(options(16 * MIB))
    values: dict[int, int] = {}
    for action, nbytes, seed in actions:
        chosen = list(values)[seed % len(values)] if values else None
        if action == "take":
            ptr = blocks.take(nbytes)
            values[ptr] = seed % 256
            _core_testing.store(ptr, bytes([seed % 256]))
            _core_testing.store(ptr + nbytes - 1, bytes([seed % 256]))
        elif action == "budget":
            _core.set_budget((8 + seed % 25) * MIB, 0)
        elif action == "policy":
            _core_testing.set_policy(["none", "lru", "conv_lru"][seed % 3])
        elif action == "trim":
            _core.trim()
        elif chosen is None:
            continue
        elif action == "drop":
            blocks.drop(chosen)
            del values[chosen]
        elif action == "use":
            use(chosen)
        elif action == "evict":
            _core.evict(chosen, blocks.live[chosen])
        elif action == "prefetch":
            try:
                _core.prefetch(chosen, blocks.live[chosen])
            except OutOfMemoryError:
                assert blocks.live[chosen] > 4 * MIB
        stats = _core.stats()
        assert stats["resident_bytes"] <= stats["budget_bytes"]
    for ptr, value in values.items():
        assert _core_testing.load(ptr, 1) == bytes([value])
        assert _core_testing.load(ptr + blocks.live[ptr] - 1, 1) == bytes([value])
    blocks.clear()
    _core.stop()
