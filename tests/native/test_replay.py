"""A step on the runtime in virtual time: the figures, and that an unbacked software device tells
what a backed one does."""

from __future__ import annotations

import time

import _core_testing
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support import synthetic
from support.steps import Tensor, make_step, steps

from umem import _core
from umem.errors import ConfigError, OutOfMemoryError, StateError
from umem.simulation.replay import columns_of
from umem.trace.step_builder import last_step
from umem.trace.step_trace import Kind, StepTrace

MIB = 1 << 20
PAGE = 2 * MIB
POLICIES = ("none", "lru", "conv_lru")
RATE = 25e3  # bytes/us of the profile, each way


def options(budget: int, **changes: object) -> _core.Options:
    made = _core.Options()
    made.budget_bytes = budget
    made.floor_bytes = 8 * MIB
    made.min_swap_bytes = PAGE
    made.profile = "a100-pcie4"
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def play(
    step: StepTrace, made: _core.Options, backed: bool = False, repeats: int = 3
) -> dict[str, float]:
    """The figures, but for the real time."""
    replay = _core.Replay(made, backed)
    try:
        replay.set_step(columns_of(step))
        replay.run_step(repeats)
        figures = replay.figures()
    finally:
        replay.close()
    del figures["seconds"]
    return figures


def training(layers: int) -> StepTrace:
    return last_step(synthetic.training(layers, PAGE, 4 * MIB, 2, small=2, optimizer=True))


def persistent(*sizes: int) -> StepTrace:
    """Op i reads tensor i alone."""
    tensors = [Tensor(size, {i: False}, Kind.PERSISTENT) for i, size in enumerate(sizes)]
    return make_step([100.0] * len(sizes), tensors)


# --- figures


@pytest.mark.parametrize("policy", POLICIES)
def test_all_fits_takes_the_time_of_the_ops(policy: str) -> None:
    step = training(4)
    figures = play(step, options(256 * MIB, policy=policy))
    assert figures["step_us"] == pytest.approx(step.op_us.sum())
    assert figures["compute_us"] == pytest.approx(step.op_us.sum())
    assert figures["stall_us"] == pytest.approx(0)
    assert figures["bytes_in"] == figures["bytes_out"] == figures["faults"] == 0
    assert figures["steps"] == 3


def test_one_absent_block_costs_its_transfers() -> None:
    # 16 and 16 MiB in 24: each op evicts the other's block and brings its own.
    figures = play(persistent(16 * MIB, 16 * MIB), options(24 * MIB))
    one = 16 * MIB / RATE
    assert figures["bytes_in"] == figures["bytes_out"] == 2 * 16 * MIB
    assert figures["evictions"] == figures["prefetches"] == 2
    assert figures["stall_us"] == pytest.approx(2 * 2 * one)  # out, then in: memory is full
    assert figures["step_us"] == pytest.approx(200 + 4 * one)
    assert figures["peak_resident_bytes"] <= 24 * MIB


def test_the_link_and_the_fault_cost_are_options() -> None:
    step = persistent(16 * MIB, 16 * MIB)
    made = options(24 * MIB, link_in_bytes_per_us=1e3, link_out_bytes_per_us=2e3)
    one = 16 * MIB / 1e3
    assert play(step, made)["stall_us"] == pytest.approx(2 * 1.5 * one)
    made = options(24 * MIB, policy="none", fault_us=1e6)
    figures = play(step, made)
    assert figures["faults"] > 0
    assert figures["stall_us"] > 1e6 * figures["faults"]


def test_labels_of_blocks() -> None:
    tensors = [
        Tensor(4 * MIB, {0: True}, Kind.PERSISTENT, "optimizer"),
        Tensor(6 * MIB, {0: True}, Kind.PERSISTENT, "something new", "nor known"),
    ]
    replay = _core.Replay(options(64 * MIB))
    try:
        replay.set_step(columns_of(make_step([1.0], tensors)))
        rows = _core_testing.blocks()
        found = {(b["bytes"] // MIB, b["tag"], b["family"], b["pins"]) for b in rows}
        assert found == {(4, "optimizer", "linear", 0), (6, "temp", "none", 0)}
        assert _core.stats()["live_bytes"] == 10 * MIB
    finally:
        replay.close()


def test_more_than_any_host_has() -> None:
    figures = play(persistent(*[1 << 36] * 60), options(139 << 30), repeats=1)  # 60 times 64 GiB
    assert figures["steps"] == 1
    assert figures["peak_resident_bytes"] <= 139 << 30


def test_an_op_above_the_budget_is_in_the_figures_alone(capfd: pytest.CaptureFixture[str]) -> None:
    made = options(16 * MIB, policy="lru")
    figures = play(persistent(32 * MIB), made)
    assert figures["faults"] > 0
    assert capfd.readouterr().err == ""


def test_exhausted_addresses_are_an_out_of_memory_error() -> None:
    with pytest.raises(OutOfMemoryError, match="asked for"):
        play(persistent(1 << 46), options(32 * MIB))
    assert not _core.running()


def test_the_host_budget_holds() -> None:
    step = persistent(*[16 * MIB] * 4)
    with pytest.raises(OutOfMemoryError, match="host budget"):
        play(step, options(24 * MIB, host_budget_bytes=16 * MIB))


# --- an unbacked device is a backed one without memory


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [12 * MIB, 20 * MIB, 32 * MIB, 256 * MIB])
def test_a_training_has_equal_figures_backed(policy: str, budget: int) -> None:
    step, made = training(4), options(budget, policy=policy)
    assert play(step, made) == play(step, made, backed=True)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(steps(), st.sampled_from(POLICIES), st.sampled_from([5, 8, 11, 40]))
def test_any_step_has_equal_figures_backed(step: StepTrace, policy: str, pages: int) -> None:
    made = options(pages * PAGE, policy=policy)
    unbacked, backed = play(step, made), play(step, made, backed=True)
    # Only with memory behind it does the device leave a page on the host that an op fetches again
    # and again, such as one of small tensors in an op that is larger than the budget.
    assume(_core.stats()["zero_copy_bytes"] == 0)
    assert unbacked == backed
    assert unbacked["step_us"] >= unbacked["compute_us"] * (1 - 1e-12)  # sums in another order
    assert unbacked["peak_resident_bytes"] <= pages * PAGE


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["read", "write", "in", "out", "discard", "mostly", "away"]),
            st.integers(0, 11),
            st.integers(1, 6),
        ),
        max_size=40,
    )
)
def test_pages_behave_the_same_without_memory(actions: list[tuple[str, int, int]]) -> None:
    assert _pages(actions, backed=False) == _pages(actions, backed=True)


def _pages(actions: list[tuple[str, int, int]], backed: bool) -> object:
    calls = _core_testing
    calls.open_soft(6 * PAGE, "a100-pcie4", backed)
    ptr = 0
    try:
        _, stream = calls.cuStreamCreate(1)
        _, ptr = calls.cuMemAllocManaged(12 * PAGE, 1)
        seen = []
        for name, first, count in actions:
            at, size = ptr + first * PAGE, min(count, 12 - first) * PAGE
            if name in ("read", "write"):
                calls.access(at, size, name == "write")
            elif name in ("in", "out"):
                calls.cuMemPrefetchAsync(at, size, (1, 0) if name == "in" else (2, 0), 0, stream)
            elif name == "discard":
                calls.cuMemDiscardBatchAsync([at], [size], 0, stream)
            else:  # read-mostly, or preferred on the host
                calls.cuMemAdvise(at, size, 1 if name == "mostly" else 3, (2, 0))
            seen.append((calls.page_states(ptr, 12 * PAGE), calls.telemetry(), calls.now_us()))
        return seen
    finally:
        calls.cuMemFree(ptr)
        calls.close()


def test_a_write_to_a_duplicate_collapses_it() -> None:
    calls = _core_testing
    calls.open_soft(6 * PAGE, "a100-pcie4", False)
    _, ptr = calls.cuMemAllocManaged(PAGE, 1)
    try:
        _, stream = calls.cuStreamCreate(1)
        calls.cuMemAdvise(ptr, PAGE, 1, (2, 0))
        calls.cuMemPrefetchAsync(ptr, PAGE, (2, 0), 0, stream)
        calls.access(ptr, PAGE, False)
        assert calls.page_states(ptr, PAGE) == ["duplicate"]
        calls.access(ptr, PAGE, False)
        assert calls.telemetry()["faults"] == 1
        calls.access(ptr, PAGE, True)
        assert calls.page_states(ptr, PAGE) == ["device"]
        assert calls.telemetry()["faults"] == 2
        with pytest.raises(ConfigError, match="not allocated"):
            calls.access(ptr + PAGE, 1, False)
        with pytest.raises(ConfigError, match="not managed"):
            calls.access(4096, 1, False)
    finally:
        calls.cuMemFree(ptr)
        calls.close()


# --- transfers in both directions at a time


def transfers(budget: int, out: list[int]) -> float:
    """The time that an op waits for 32 MiB while `out` MiB are on their way out, in 32 MiB."""
    _core.start(options(budget, backed=False))
    blocks = []
    try:
        comes = _core.allocate(32 * MIB)
        blocks = [comes]
        _core.evict(comes, 1)
        blocks += [_core.allocate(size * MIB) for size in out]
        _core_testing.cuCtxSynchronize()
        start = _core_testing.now_us()
        for ptr in blocks[1:]:
            _core.evict(ptr, 1)
        _core.op_end(_core.op_begin([comes], "", ""), "")
        _core_testing.cuStreamSynchronize(0)
        return float(_core_testing.now_us() - start) / (32 * MIB / RATE)
    finally:
        for ptr in blocks:
            _core.release(ptr)
        _core.stop()


def test_what_comes_in_passes_what_goes_out_where_there_is_room() -> None:
    assert transfers(96 * MIB, [32, 32]) == pytest.approx(1.0)  # in addition to both
    assert transfers(64 * MIB, [32, 32]) == pytest.approx(2.0)  # after the first
    assert transfers(32 * MIB, [32]) == pytest.approx(2.0)  # in place of it
    assert transfers(64 * MIB, [16, 16, 16, 16]) == pytest.approx(2.0)  # after two of four


def test_a_new_block_does_not_wait_for_what_comes_in() -> None:
    _core.start(options(128 * MIB, backed=False))
    blocks = [_core.allocate(32 * MIB), _core.allocate(16 * MIB)]
    dead = _core.allocate(96 * MIB)
    try:
        _core.evict(blocks[0], 1)
        _core.release(dead)
        _core_testing.cuCtxSynchronize()
        start = _core_testing.now_us()
        _core.prefetch(blocks[0], 1)  # in the memory of dead bytes
        token = _core.op_begin([blocks[1]], "", "")
        blocks.append(_core.allocate(48 * MIB))
        _core.op_end(token, "")
        _core_testing.cuStreamSynchronize(0)
        assert _core_testing.now_us() == start
        _core.op_end(_core.op_begin([blocks[0]], "", ""), "")
        _core_testing.cuStreamSynchronize(0)
        assert _core_testing.now_us() - start == pytest.approx(32 * MIB / RATE)
    finally:
        for ptr in blocks:
            _core.release(ptr)
        _core.stop()


# --- one step, again and again


def columns(**changes: object) -> dict[str, object]:
    """Weight 0 is read by both ops; 1 lives in the step, 2 is made for the next one's 3."""
    ints = np.int64
    made: dict[str, object] = {
        "op_us": np.array([100.0, 50.0]),
        "large": np.array([True] * 4),
        "bytes": np.array([4 * MIB, 6 * MIB, 8 * MIB, 8 * MIB], ints),
        "tag": ["param", "activation", "", "grad"],
        "family": ["", "conv", "linear", ""],
        "kind": np.array(Kind, ints),
        "first": np.array([0, 0, 1, 0], ints),
        "last": np.array([1, 1, 1, 0], ints),
        "next_alias": np.array([-1, -1, -1, 2], ints),
        "access_start": np.array([0, 3, 6], ints),
        "access_tensor": np.array([0, 3, 1, 0, 1, 2], ints),
        "access_write": np.array([False, False, True, False, False, True]),
    }
    return made | changes


@pytest.mark.parametrize("backed", [False, True])
def test_a_step_repeats(backed: bool) -> None:
    replay = _core.Replay(options(64 * MIB), backed)
    try:
        # The carried one leaves after the made one has arrived.
        replay.set_step(columns(last=np.array([1, 1, 1, 1], np.int64)))
        assert replay.address(0) > 0
        assert replay.address(1) == 0
        first = replay.address(3)
        replay.run_step(1)
        assert replay.address(3) not in (0, first)  # the one that tensor 2 was
        assert replay.address(2) == 0
        replay.run_step(4)
        figures = replay.figures()
        assert (figures["steps"], figures["step_us"], figures["faults"]) == (5, 150.0, 0)
        assert figures["events"] == 5 * (2 + 2 + 2 + 1)
        assert _core.stats()["live_bytes"] == 12 * MIB
    finally:
        replay.close()
    assert _core.stats()["live_bytes"] == 0


def test_what_is_carried_nowhere_leaves_with_the_step() -> None:
    replay = _core.Replay(options(64 * MIB))
    try:
        replay.set_step(columns(next_alias=np.array([-1, -1, -1, -1], np.int64)))
        replay.run_step(2)
        assert _core.stats()["live_bytes"] == 4 * MIB  # the weight alone
    finally:
        replay.close()


def test_small_tensors_stay_small() -> None:
    sizes = np.array([4 * MIB, PAGE, 8 * MIB, 8 * MIB], np.int64)
    large = np.array([True, False, True, True])
    replay = _core.Replay(options(64 * MIB))
    try:
        replay.set_step(columns(bytes=sizes, large=large))
        replay.run_step(1)
        assert "pool" in {block["tag"] for block in _core_testing.blocks()}
    finally:
        replay.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bytes": np.array([1, 2, 3], np.int64)}, "differ in length"),
        ({"bytes": np.array([1.0, 2, 3, 4])}, "bytes is no one-dimensional numpy array of int64"),
        ({"op_us": np.array([1.0, -2.0])}, "negative or not finite"),
        ({"kind": np.array([0, 1, 2, 4], np.int64)}, "tensor 3 has the unknown kind 4"),
        ({"first": np.array([0, 2, 1, 0], np.int64)}, "tensor 1 begins at op 2 of 2"),
        ({"last": np.array([1, -1, 1, 0], np.int64)}, "tensor 1 ends at op -1"),
        ({"last": np.array([1, 0, 1, 0], np.int64)}, "op 1 accesses tensor 1 outside of its life"),
        (
            {"next_alias": np.array([-1, -1, -1, 1], np.int64)},
            "its next-step alias 1 is no tensor of kind MADE",
        ),
        ({"access_tensor": np.array([0, 3, 1, 0, 1, 9], np.int64)}, "the unknown tensor 9"),
        ({"access_start": np.array([0, 7, 6], np.int64)}, "access_start decreases"),
        ({"access_start": np.array([0, 6], np.int64)}, "access_start does not fit"),
        ({"names": ["a"], "op_name": np.array([0], np.int64)}, "op_name does not fit op_us"),
        ({"names": ["a"], "op_name": np.array([0, 1], np.int64)}, "a number that is no name's"),
    ],
)
def test_a_bad_step_is_refused(changes: dict[str, object], reason: str) -> None:
    replay = _core.Replay(options(64 * MIB))
    try:
        with pytest.raises(ValueError, match=reason):
            replay.set_step(columns(**changes))
    finally:
        replay.close()


# --- one at a time


def test_one_replay_and_only_while_umem_is_off() -> None:
    replay = _core.Replay(options(32 * MIB))
    with pytest.raises(StateError, match="open already"):
        _core.Replay(options(32 * MIB))
    with pytest.raises(StateError, match="call set_step first"):
        replay.run_step(1)
    with pytest.raises(ValueError, match="at least one op"):
        replay.set_step(columns(op_us=np.array([])))
    with pytest.raises(StateError, match="failed before"):
        replay.set_step(columns())
    replay.close()
    replay.close()
    with pytest.raises(StateError, match="closed"):
        replay.set_step(columns())
    _core.start(options(32 * MIB))
    try:
        with pytest.raises(StateError, match="umem is on"):
            _core.Replay(options(32 * MIB))
        held = _core.allocate(4 * MIB)
    finally:
        _core.stop()
    try:
        with pytest.raises(StateError, match="still alive"):
            _core.Replay(options(32 * MIB))
    finally:
        _core.release(held)
    _core.Replay(options(32 * MIB)).close()


def test_bad_options_are_refused_and_leave_nothing_open() -> None:
    for made in (options(1), options(32 * MIB, policy="x"), options(32 * MIB, fault_us=-1.0)):
        with pytest.raises(ConfigError):
            _core.Replay(made)
    _core.Replay(options(32 * MIB)).close()


def test_memory_is_given_back_when_the_object_goes() -> None:
    replay = _core.Replay(options(32 * MIB))
    replay.set_step(columns())
    del replay
    assert not _core.running()
    assert _core.stats()["live_bytes"] == 0


def test_many_blocks_are_given_back_as_fast_as_they_came() -> None:
    step = persistent(*[PAGE] * 50_000)  # with a search of the free list for each, 40 times slower
    ratios = []  # the least of a few: the processor's speed may change at any time
    for _ in range(5):
        replay = _core.Replay(options(32 * MIB))
        begin = time.process_time()
        replay.set_step(columns_of(step))
        middle = time.process_time()
        replay.close()
        ratios.append((time.process_time() - middle) / (middle - begin))
    assert min(ratios) < 2, ratios
