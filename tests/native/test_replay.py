"""Traces on the runtime in virtual time: the reader, the figures, and that an unbacked software
device reports the behaviour of a backed one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from umem import _core
from umem.errors import ConfigError, OutOfMemoryError, StateError

MIB = 1 << 20
PAGE = 2 * MIB
POLICIES = ("none", "lru", "conv_lru")
HEADER = {"kind": "umem-trace", "v": 1}
RATE = 25e3  # bytes/us of the profile, each way

Event = dict[str, Any]


def options(budget: int, **changes: object) -> _core.Options:
    made = _core.Options()
    made.budget_bytes = budget
    made.floor_bytes = 8 * MIB
    made.min_swap_bytes = PAGE
    made.profile = "a100-pcie4"
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def alloc(block: int, nbytes: int, **keys: object) -> Event:
    return {"e": "alloc", "id": block, "bytes": nbytes, **keys}


def free(block: int) -> Event:
    return {"e": "free", "id": block}


def op(reads: list[int], writes: list[int], us: float = 100.0, **keys: object) -> Event:
    return {"e": "op", "name": "f", "r": reads, "w": writes, "us": us, **keys}


def text(*events: Event | str) -> bytes:
    lines = (event if isinstance(event, str) else json.dumps(event) for event in events)
    return "".join(f"{line}\n" for line in lines).encode()


def play(trace: bytes, made: _core.Options, backed: bool = False) -> dict[str, float]:
    """The figures, but for the real time."""
    replay = _core.Replay(made, backed)
    try:
        replay.feed(trace)
        replay.finish()
        figures = replay.figures()
    finally:
        replay.close()
    del figures["seconds"]
    return figures


def training(layers: int, steps: int, nbytes: int) -> Iterator[Event]:
    """Weights, activations kept from the forward to the backward pass, small scratch."""
    yield HEADER
    for weight in range(layers):
        yield alloc(weight, PAGE, tag="param")
    ids = iter(range(layers, 10**9))
    for _ in range(steps):
        kept: list[int] = []
        for layer in range(layers):
            kept.append(next(ids))
            scratch = next(ids)
            yield alloc(kept[-1], nbytes, tag="activation", family="conv")
            yield alloc(scratch, 5000)
            yield free(scratch)
            yield op([layer, *kept[-2:-1]], [kept[-1]], 153.25)
        gradient = kept[-1]
        for layer in reversed(range(layers)):
            before, gradient = gradient, next(ids)
            yield alloc(gradient, nbytes, tag="grad")
            yield op([layer, kept[layer], before], [gradient], 300.0)
            if before not in kept:
                yield free(before)
            yield free(kept[layer])
        yield free(gradient)
        for layer in range(layers):
            yield op([layer], [layer], 20.5)
        yield {"e": "step"}


# --- figures


@pytest.mark.parametrize("policy", POLICIES)
def test_all_fits_takes_the_time_of_the_ops(policy: str) -> None:
    layers, us = 4, 4 * (153.25 + 300.0 + 20.5)
    trace = text(*training(layers, 3, 4 * MIB))
    figures = play(trace, options(256 * MIB, policy=policy))
    assert figures["step_us"] == pytest.approx(us)
    assert figures["compute_us"] == pytest.approx(us)
    assert figures["stall_us"] == pytest.approx(0)
    assert figures["bytes_in"] == figures["bytes_out"] == figures["faults"] == 0
    assert figures["steps"] == 3
    assert figures["events"] == trace.count(b"\n") - 1


def test_one_absent_block_costs_its_transfers() -> None:
    # 16 and 16 MiB in 24: each op evicts the other's block and brings its own.
    events = [HEADER, alloc(1, 16 * MIB), alloc(2, 16 * MIB)]
    for _ in range(3):
        events += [op([1], []), op([2], []), {"e": "step"}]
    figures = play(text(*events), options(24 * MIB))
    one = 16 * MIB / RATE
    assert figures["bytes_in"] == figures["bytes_out"] == 2 * 16 * MIB
    assert figures["evictions"] == figures["prefetches"] == 2
    assert figures["stall_us"] == pytest.approx(2 * 2 * one)  # out, then in: memory is full
    assert figures["step_us"] == pytest.approx(200 + 4 * one)
    assert figures["peak_resident_bytes"] <= 24 * MIB


def test_the_link_and_the_fault_cost_are_options() -> None:
    events = [HEADER, alloc(1, 16 * MIB), alloc(2, 16 * MIB)]
    for _ in range(3):
        events += [op([1], []), op([2], []), {"e": "step"}]
    made = options(24 * MIB, link_in_bytes_per_us=1e3, link_out_bytes_per_us=2e3)
    one = 16 * MIB / 1e3
    assert play(text(*events), made)["stall_us"] == pytest.approx(2 * 1.5 * one)
    made = options(24 * MIB, policy="none", fault_us=1e6)
    figures = play(text(*events), made)
    assert figures["faults"] > 0
    assert figures["stall_us"] > 1e6 * figures["faults"]


def test_a_trace_without_steps_is_one() -> None:
    figures = play(text(HEADER, alloc(1, 4 * MIB), op([], [1], 7.5)), options(32 * MIB))
    assert figures["steps"] == 1
    assert figures["step_us"] == 7.5


def test_scratch_and_labels_of_blocks() -> None:
    replay = _core.Replay(options(64 * MIB))
    try:
        replay.feed(
            text(
                HEADER,
                alloc(1, 4 * MIB, tag="optimizer", family="linear"),
                alloc(2, 6 * MIB, tag="something new"),
                alloc(3, 8 * MIB),
                free(3),
                op([], [1, 2]),
            )
        )
        found = {(b["bytes"] // MIB, b["tag"], b["family"], b["pins"]) for b in _core.blocks()}
        assert {(4, "optimizer", "linear", 0), (6, "temp", "none", 0)} <= found
        assert [b["state"] for b in _core.blocks() if b["bytes"] == 8 * MIB] == ["dead"]
        assert _core.stats()["live_bytes"] == 10 * MIB
    finally:
        replay.close()


def test_more_than_any_host_has() -> None:
    big, n = 1 << 36, 60  # 60 times 64 GiB live
    events = [HEADER, *(alloc(i, big) for i in range(n)), op([0], [n - 1]), {"e": "step"}]
    figures = play(text(*events), options(139 << 30))
    assert figures["steps"] == 1
    assert figures["peak_resident_bytes"] <= 139 << 30


def test_exhausted_addresses_are_an_out_of_memory_error() -> None:
    replay = _core.Replay(options(32 * MIB))
    try:
        with pytest.raises(OutOfMemoryError, match=r"^3: .*asked for"):
            replay.feed(text(HEADER, alloc(1, 1 << 46), op([], [1])))
    finally:
        replay.close()
    assert not _core.running()


def test_the_host_budget_holds() -> None:
    events = [HEADER, *(alloc(i, 16 * MIB) for i in range(4)), op([0], []), {"e": "step"}]
    with pytest.raises(OutOfMemoryError, match="host budget"):
        play(text(*events), options(24 * MIB, host_budget_bytes=16 * MIB))


# --- an unbacked device is a backed one without memory


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [12 * MIB, 20 * MIB, 32 * MIB, 256 * MIB])
def test_a_training_has_equal_figures_backed(policy: str, budget: int) -> None:
    trace = text(*training(4, 2, 4 * MIB))
    made = options(budget, policy=policy)
    assert play(trace, made) == play(trace, made, backed=True)


SIZES = st.sampled_from([0, 1, 1000, 300_000, 3 * PAGE // 2, PAGE, PAGE - 1, 2 * PAGE, 3 * PAGE])


@st.composite
def traces(draw: st.DrawFn) -> list[Event]:
    """Any valid one of at most 40 events, with at most 14 pages live."""
    live: dict[int, int] = {}
    events: list[Event] = [HEADER]
    for i in range(draw(st.integers(1, 40))):
        kind = draw(st.sampled_from(["alloc", "alloc", "op", "op", "op", "free", "step"]))
        if kind == "alloc":
            size = draw(SIZES)
            if sum(live.values()) + size > 14 * PAGE:
                continue
            live[i] = size
            tag = draw(st.sampled_from(["", "activation", "param"]))
            events.append(alloc(i, size, tag=tag, family=draw(st.sampled_from(["conv", "norm"]))))
        elif kind == "op":
            ids = st.lists(st.sampled_from(sorted(live)), max_size=3) if live else st.just([])
            events.append(op(draw(ids), draw(ids), draw(st.sampled_from([0.0, 10.5, 700.0]))))
        elif kind == "free" and live:
            gone = draw(st.sampled_from(sorted(live)))
            del live[gone]
            events.append(free(gone))
        elif kind == "step":
            events.append({"e": "step"})
    return events


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(traces(), st.sampled_from(POLICIES), st.sampled_from([5, 8, 11, 40]))
def test_any_trace_has_equal_figures_backed(events: list[Event], policy: str, pages: int) -> None:
    made = options(pages * PAGE, policy=policy)
    trace = text(*events)
    unbacked = play(trace, made)
    assert unbacked == play(trace, made, backed=True)
    assert unbacked["step_us"] >= unbacked["compute_us"] * (1 - 1e-12)  # sums in another order
    assert unbacked["peak_resident_bytes"] <= pages * PAGE


@settings(max_examples=60, deadline=None)
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
    calls = _core.driver
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
    calls = _core.driver
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
        _core.driver.cuCtxSynchronize()
        start = _core.driver.now_us()
        for ptr in blocks[1:]:
            _core.evict(ptr, 1)
        _core.op_end(_core.op_begin([comes], "", ""), "")
        _core.driver.cuStreamSynchronize(0)
        return float(_core.driver.now_us() - start) / (32 * MIB / RATE)
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
        _core.driver.cuCtxSynchronize()
        start = _core.driver.now_us()
        _core.prefetch(blocks[0], 1)  # in the memory of dead bytes
        token = _core.op_begin([blocks[1]], "", "")
        blocks.append(_core.allocate(48 * MIB))
        _core.op_end(token, "")
        _core.driver.cuStreamSynchronize(0)
        assert _core.driver.now_us() == start
        _core.op_end(_core.op_begin([blocks[0]], "", ""), "")
        _core.driver.cuStreamSynchronize(0)
        assert _core.driver.now_us() - start == pytest.approx(32 * MIB / RATE)
    finally:
        for ptr in blocks:
            _core.release(ptr)
        _core.stop()


# --- the reader

GOOD = text(*training(2, 1, 3 * MIB))


def test_pieces_may_be_cut_anywhere() -> None:
    trace = text(
        {**HEADER, "note": 'escapes \\ " \n é 😀'},
        '{"e":"alloc","id":9223372036854775807,"bytes":4194304,"t\\u0061g":"param","x":[{"y":[]}]}',
        '  {"w": [ 9223372036854775807 ] , "us": 1.5e2, "name": "a\\"b\\\\", "e": "\\u006fp"} \r',
        {"e": "step", "extra": {"a": [1, -2.5e-3, None, True, False, "x"], "b": {}}},
    )
    made = options(32 * MIB)
    whole = play(trace, made)
    assert (whole["step_us"], whole["events"]) == (150.0, 3)
    for cut in range(len(trace) + 1):
        replay = _core.Replay(made)
        try:
            replay.feed(trace[:cut])
            replay.feed(trace[cut:])
            replay.finish()
            assert {k: v for k, v in replay.figures().items() if k != "seconds"} == whole
        finally:
            replay.close()


def test_the_last_line_may_lack_its_break() -> None:
    assert play(GOOD.rstrip(b"\n"), options(32 * MIB)) == play(GOOD, options(32 * MIB))


def test_a_key_of_another_event_has_no_meaning() -> None:
    made, used = alloc(1, 4 * MIB), op([], [1])
    plain = text(HEADER, made, used, free(1), {"e": "step"})
    with_others = text(
        HEADER, made | {"i": [0], "us": "x", "r": {}}, {"bytes": None} | used | {"tag": 3},
        {"name": 5} | free(1) | {"flops": -1}, {"id": "x", "e": "step"},
    )  # fmt: skip
    assert play(with_others, options(32 * MIB)) == play(plain, options(32 * MIB))


def test_of_a_key_that_is_twice_the_last_value_counts() -> None:
    twice = '{"e":"op","name":"f","us":5,"us":null}'
    with pytest.raises(ValueError, match='the op has no "us"'):
        play(text(HEADER, twice), options(32 * MIB))


ONE = json.dumps(alloc(1, 100))


def parts_of(rows: str) -> str:
    return f'{{"e":"op","name":"f","us":1,"r":[1],"parts":{rows}}}'


BAD = {
    "empty": ([], 1, "empty"),
    "no object": (["[1]"], 1, "not a JSON object"),
    "blank line": ([""], 1, "not a JSON object"),
    "other file": (['{"a":1}'], 1, "not a trace"),
    "no version": (['{"kind":"umem-trace"}'], 1, "'v' is missing"),
    "version": (['{"kind":"umem-trace","v":2}'], 1, "version 2 is unknown.*reads version 1"),
    "event": ([HEADER, {"e": "malloc"}], 2, "'malloc' is unknown; events are alloc, op"),
    "no kind": ([HEADER, '{"e":"","x":1,"e":"step"}'], 2, 'key "e" is missing'),
    "no event": ([HEADER, {"id": 1}], 2, 'key "e" is missing'),
    "unknown id": ([HEADER, op([7], [])], 2, "uses id 7, which is not live"),
    "use after free": ([HEADER, ONE, free(1), op([], [1])], 4, "uses id 1, which is not live"),
    "double free": ([HEADER, ONE, free(1), free(1)], 4, "free of id 1, which is not live"),
    "double alloc": ([HEADER, ONE, ONE], 3, "id 1 is allocated twice"),
    "negative size": ([HEADER, alloc(1, -5)], 2, "bytes is -5; allowed: 0 to"),
    "float size": ([HEADER, alloc(1, 5.5)], 2, "bytes is 5.5, not an integer"),  # type: ignore[arg-type]
    "text size": ([HEADER, '{"e":"alloc","id":1,"bytes":"x"}'], 2, 'bytes is "x", not a number'),
    "no size": ([HEADER, {"e": "alloc", "id": 1}], 2, "'bytes' is missing"),
    "large id": ([HEADER, alloc(1 << 63, 1)], 2, "id is 9223372036854775808; allowed: 0 to"),
    "huge id": ([HEADER, alloc(10**30, 1)], 2, "id is 10+; allowed: 0 to"),
    "negative us": ([HEADER, op([], [], -1.0)], 2, r"us is -1.0; allowed: 0 to 1e\+15"),
    "infinite us": ([HEADER, '{"e":"op","name":"f","us":1e999}'], 2, "us is 1e999; allowed"),
    "no us": ([HEADER, {"e": "op", "name": "f"}], 2, 'the op has no "us"'),
    "no name": ([HEADER, {"e": "op", "us": 1}], 2, "'name' is missing"),
    "NaN": ([HEADER, '{"e":"op","name":"f","us":NaN}'], 2, "us is NaN, not a number"),
    "ids": ([HEADER, '{"e":"op","name":"f","us":1,"r":7}'], 2, "r is 7, not a list"),
    "parts": ([HEADER, ONE, parts_of("7")], 3, "parts is 7, not a list"),
    "parts in twos": ([HEADER, ONE, parts_of("[0,0]")], 3, "not in rows of three"),
    "part of no access": ([HEADER, ONE, parts_of("[1,0,1]")], 3, "access 1, and the op has 1"),
    "empty part": (
        [HEADER, ONE, parts_of("[0,5,5]")],
        3,
        "has bytes 5 to 5 of id 1, which has 100",
    ),
    "long part": ([HEADER, ONE, parts_of("[0,0,101]")], 3, "has bytes 0 to 101 of id 1"),
    "cut off": ([HEADER, '{"e":"step"'], 2, "not JSON: expected ',' or '}' at column 12"),
    "cut string": ([HEADER, '{"e":"st'], 2, "a string without an end"),
    "after": ([HEADER, '{"e":"step"} x'], 2, "text after the object at column 14"),
    "comma": ([HEADER, '{"e":"step",}'], 2, "expected a key in quotes"),
    "zeros": ([HEADER, '{"e":"free","id":01}'], 2, "id is 01, not a number"),
    "escape": ([HEADER, r'{"e":"op","name":"\x41"}'], 2, "an unknown escape"),
    "surrogate": ([HEADER, r'{"e":"op","name":"\ud800."}'], 2, "half of a surrogate pair"),
    "hex": ([HEADER, r'{"e":"op","name":"\u12"}'], 2, "without 4 hex digits"),
    "word": ([HEADER, '{"e":"step","x":nul}'], 2, "not a value at column 17"),
    "deep": ([HEADER, '{"e":"step","x":' + "[" * 40 + "]" * 40 + "}"], 2, "nested too deeply"),
}


def feed(replay: _core.Replay, trace: bytes, step: int) -> None:
    for at in range(0, max(len(trace), 1), step):
        replay.feed(trace[at : at + step])
    replay.finish()


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_with_its_line(case: str) -> None:
    events, line, reason = BAD[case]
    for step in (1, 1 << 20):
        replay = _core.Replay(options(32 * MIB))
        try:
            with pytest.raises(ValueError, match=f"^{line}: .*{reason}"):
                feed(replay, text(*events), step)
            with pytest.raises(StateError, match=r"failed before|has ended"):
                replay.feed(b"")
        finally:
            replay.close()
        assert _core.stats()["live_bytes"] == 0


def test_a_line_has_an_end() -> None:
    most = 1 << 20
    line = '{"e":"step","x":"' + "y" * (most - 19) + '"}'
    assert len(line) == most
    assert play(text(HEADER, line), options(32 * MIB))["steps"] == 1
    with pytest.raises(ValueError, match=r"^2: the line is longer than 1048576 bytes"):
        play(text(HEADER, line + " "), options(32 * MIB))
    replay = _core.Replay(options(32 * MIB))
    with pytest.raises(ValueError, match=r"^1: the line is longer"):
        feed(replay, b" " * (2 * most), 1 << 16)  # without any line break
    replay.close()


def test_bytes_that_are_no_text_are_named_with_their_line_too() -> None:
    replay = _core.Replay(options(32 * MIB))
    with pytest.raises(ValueError, match=r"^2: .*'\ufffdx' is unknown"):
        replay.feed(text(HEADER) + b'{"e":"\xffx"}\n')
    replay.close()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_text_never_does_harm(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(GOOD) - 1))
    junk = data.draw(st.binary(max_size=4) | st.sampled_from([b'"', b"}", b"\\u", b"1e9", b"\n"]))
    gone = data.draw(st.integers(0, 3))
    replay = _core.Replay(options(32 * MIB))
    try:
        replay.feed(GOOD[:at] + junk + GOOD[at + gone :])
        replay.finish()
    except (ValueError, OutOfMemoryError):
        pass
    finally:
        replay.close()
    assert _core.stats()["live_bytes"] == 0


# --- one step, repeated

PERSISTENT, TRANSIENT, MADE, CARRIED = range(4)


def columns(**changes: object) -> dict[str, object]:
    """Weight 0 is read by both ops; 1 lives in the step, 2 is made for the next one's 3."""
    ints = np.int64
    made: dict[str, object] = {
        "op_us": np.array([100.0, 50.0]),
        "bytes": np.array([4 * MIB, 6 * MIB, 8 * MIB, 8 * MIB], ints),
        "tag": ["param", "activation", "", "grad"],
        "family": ["", "conv", "linear", ""],
        "kind": np.array([PERSISTENT, TRANSIENT, MADE, CARRIED], ints),
        "first": np.array([0, 0, 1, 0], ints),
        "last": np.array([1, 1, 1, 0], ints),
        "next_alias": np.array([-1, -1, -1, 2], ints),
        "source": np.array([10, 11, 12, 13], ints),
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


def test_a_step_goes_on_with_the_blocks_of_its_trace() -> None:
    one = [alloc(11, 6 * MIB), op([10, 13], [11]), free(13), alloc(12, 8 * MIB), op([10, 11], [12])]
    replay = _core.Replay(options(64 * MIB))
    try:
        replay.feed(text(HEADER, alloc(10, 4 * MIB), alloc(13, 8 * MIB), *one, free(11)))
        replay.finish()
        live = _core.stats()["live_bytes"]
        allocs = _core.stats()["allocs"]
        replay.set_step(columns())
        assert _core.stats()["live_bytes"] == live == 12 * MIB
        assert _core.stats()["allocs"] == allocs
        replay.run_step(3)
        assert replay.figures()["steps"] == 4
        with pytest.raises(StateError, match="trace has ended"):
            replay.feed(b"")
    finally:
        replay.close()


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
        assert "pool" in {block["tag"] for block in _core.blocks()}
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
    ],
)
def test_a_bad_step_is_refused(changes: dict[str, object], reason: str) -> None:
    replay = _core.Replay(options(64 * MIB))
    try:
        with pytest.raises(ValueError, match=reason):
            replay.set_step(columns(**changes))
    finally:
        replay.close()


def test_a_source_that_is_not_live_is_refused() -> None:
    replay = _core.Replay(options(64 * MIB))
    try:
        replay.feed(text(HEADER, alloc(10, 4 * MIB), op([10], [])))
        with pytest.raises(ValueError, match="tensor 2 has the source 12, which is not live"):
            replay.set_step(columns())
    finally:
        replay.close()


# --- one at a time


def test_one_replay_and_only_while_umem_is_off() -> None:
    replay = _core.Replay(options(32 * MIB))
    with pytest.raises(StateError, match="open already"):
        _core.Replay(options(32 * MIB))
    with pytest.raises(StateError, match="call set_step first"):
        replay.run_step(1)
    with pytest.raises(StateError, match="feed it first"):
        replay.finish()
    replay.close()
    replay.close()
    with pytest.raises(StateError, match="closed"):
        replay.feed(b"")
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
    replay.feed(text(HEADER, alloc(1, 4 * MIB), op([], [1])))
    del replay
    assert not _core.running()
    assert _core.stats()["live_bytes"] == 0


def test_many_blocks_are_given_back_as_fast_as_they_came() -> None:
    blocks = range(50_000)  # with a search of the free list for each, 40 times slower
    replay = _core.Replay(options(32 * MIB))
    begin = time.process_time()
    replay.feed(text(HEADER, *(alloc(block, PAGE) for block in blocks)))
    replay.feed(text(*(free(block) for block in blocks)))
    replay.finish()
    middle = time.process_time()
    replay.close()
    assert time.process_time() - middle < 2 * (middle - begin)
