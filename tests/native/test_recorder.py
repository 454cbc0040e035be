"""The recorder of the runtime's hooks, without torch."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import _core_testing
import pytest
from support import recorded

from umem import _core
from umem.trace.schema import Alloc, Event, Free, Op, Step, Validator

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _running() -> Iterator[None]:
    options = _core.Options()
    options.device, options.policy = "soft", "lru"
    options.budget_bytes = options.floor_bytes = 64 * MIB
    _core.start(options)
    yield
    for block in _core_testing.blocks():  # leftovers of a failed test
        _core.release(block["base"])
    _core.stop()


def taken() -> list[Event]:
    """Return the events since the last call, after checking the place of each."""
    return recorded.taken(_core.record_take("plan"))


def op(
    name: str, inputs: list[int], makes: int = 0, n_overwritten: int = 0, n_written: int = 0
) -> list[int]:
    token = _core.op_begin(inputs, "linear", "forward", name, n_overwritten, n_written)
    made = [_core.allocate(4 * MIB) for _ in range(makes)]
    _core.op_end(token, "activation")
    return made


def test_off_it_records_nothing() -> None:
    block = _core.allocate(4 * MIB)
    op("aten::mm", [block])
    _core.release(block)
    assert taken() == []
    assert _core.record_waiting("plan") == 0


def test_blocks_that_were_there_come_first() -> None:
    large, small = _core.allocate(4 * MIB), _core.allocate(100)
    _core.tag(large, "param")
    _core.record_start("plan")
    events = taken()
    assert [(e.bytes, e.tag) for e in events if type(e) is Alloc] == [(100, ""), (4 * MIB, "param")]
    assert len(events) == 2
    _core.release(large)
    _core.release(small)


def test_an_op_reads_writes_and_makes() -> None:
    _core.record_start("plan")
    a, b = _core.allocate(4 * MIB), _core.allocate(300)
    (out,) = op("aten::add_", [b, a], makes=1, n_overwritten=0, n_written=1)
    first, second, third, done = taken()
    assert (type(first), type(second), type(third)) == (Alloc, Alloc, Alloc)
    assert isinstance(third, Alloc)
    assert isinstance(done, Op)
    assert (third.tag, third.family) == ("activation", "linear")  # as known when the op ended
    assert done.name == "aten::add_"
    assert set(done.reads) == {1, 2}
    assert done.writes == (2, 3)
    assert done.us is not None
    for block in (a, b, out):
        _core.release(block)


def test_an_op_on_parts_says_which() -> None:
    _core.record_start("plan")
    a, b = _core.allocate(8 * MIB), _core.allocate(4 * MIB)
    taken()

    def parts(inputs: list[int], **counts: Any) -> tuple[int, ...]:
        _core.op_end(_core.op_begin(inputs, "", "", **counts), "")
        (done,) = taken()
        assert isinstance(done, Op)
        return done.parts

    assert parts([a, b], parts={0: (MIB, MIB)}) == (0, MIB, 2 * MIB)
    assert parts([b, a, a], parts={1: (0, 5), 2: (7, 2)}) == (1, 0, 5, 1, 7, 9)
    assert parts([a], parts={0: (0, 8 * MIB)}) == ()
    # A whole and a part are a whole, in either order.
    assert parts([a, a], parts={1: (0, 5)}) == ()
    assert parts([a, a], parts={0: (0, 5)}) == (0, 0, 5, 0, 0, 8 * MIB)
    # Written, and not read before.
    assert parts([a], parts={0: (0, 5)}, n_overwritten=1, n_written=1) == (0, 0, 5)
    # Beyond the requested block: its range is larger.
    assert parts([a], parts={0: (4 * MIB, 9 * MIB)}) == (0, 4 * MIB, 8 * MIB)
    for block in (a, b):
        _core.release(block)


def test_parts_of_helpers_are_left_out_with_their_ops() -> None:
    _core.step()  # this thread runs steps, and others help
    _core.record_start("plan")
    a = _core.allocate(8 * MIB)
    taken()

    def part(begin: int) -> None:
        _core.op_end(_core.op_begin([a], "", "", parts={0: (begin, 5)}), "")

    part(1)
    helper = threading.Thread(target=part, args=(2,))
    helper.start()
    helper.join()
    part(3)
    found = [done.parts for done in taken() if isinstance(done, Op)]
    assert found == [(0, 1, 6), (0, 3, 8)]
    _core.release(a)


def test_blocks_of_helpers_begin_in_the_order_of_the_ops_inputs() -> None:
    """As the plan counts them: what the op writes, then what it reads."""
    _core.record_start("plan")
    blocks: list[int] = []

    def allocate() -> None:
        blocks.extend(_core.allocate(size * MIB) for size in (4, 8))

    helper = threading.Thread(target=allocate)
    helper.start()
    helper.join()
    source, target = blocks
    op("aten::copy_", [target, source], n_overwritten=1, n_written=1)
    sizes = [event.bytes for event in taken() if isinstance(event, Alloc)]
    assert sizes == [8 * MIB, 4 * MIB]
    for block in blocks:
        _core.release(block)


def test_what_is_overwritten_is_not_read() -> None:
    _core.record_start("plan")
    a, b = _core.allocate(4 * MIB), _core.allocate(4 * MIB)
    op("aten::copy_", [a, b], n_overwritten=1, n_written=1)
    done = taken()[-1]
    assert isinstance(done, Op)
    assert (done.reads, done.writes) == ((2,), (1,))
    _core.release(a)
    _core.release(b)


def test_scratch_is_allocated_and_freed_before_its_op() -> None:
    _core.record_start("plan")
    a = _core.allocate(4 * MIB)
    token = _core.op_begin([a], "conv", "forward", "aten::convolution")
    _core.release(_core.allocate(8 * MIB))
    _core.op_end(token, "activation")
    kinds = [type(event) for event in taken()]
    assert kinds == [Alloc, Alloc, Free, Op]
    _core.release(a)


def test_children_come_before_parents_and_times_are_their_own() -> None:
    import time

    _core.record_start("plan")
    a = _core.allocate(4 * MIB)
    begin = time.perf_counter()
    outer = _core.op_begin([a], "", "forward", "outer")
    inner = _core.op_begin([a], "", "forward", "inner")
    time.sleep(0.05)
    _core.op_end(inner, "")
    _core.op_end(outer, "")
    one, two = [event for event in taken() if isinstance(event, Op)]
    assert (one.name, two.name) == ("inner", "outer")
    assert one.us is not None
    assert two.us is not None
    assert one.us >= 50_000
    assert one.us + two.us < 1e6 * (time.perf_counter() - begin)
    _core.release(a)


def test_a_tag_that_comes_later_reaches_the_allocation() -> None:
    _core.record_start("plan")
    a = _core.allocate(4 * MIB)
    _core.tag(a, "param")
    (event,) = taken()
    assert isinstance(event, Alloc)
    assert event.tag == "param"
    _core.release(a)


def test_an_op_of_an_earlier_recording_is_left_out() -> None:
    a = _core.allocate(4 * MIB)
    _core.record_start("plan")
    token = _core.op_begin([a], "", "forward", "old")
    _core.record_stop("plan")
    _core.record_start("plan")
    _core.op_end(token, "")
    op("new", [a])
    assert [event.name for event in taken() if isinstance(event, Op)] == ["new"]
    _core.release(a)


def test_two_sinks_have_the_same_ids_and_each_its_own_part() -> None:
    _core.record_start("file")
    a = _core.allocate(4 * MIB)
    _core.step()
    _core.record_start("plan")
    op("aten::relu", [a])
    assert [type(event) for event in taken()] == [Alloc, Op]
    lines, dropped = _core.record_lines("file", True)
    assert lines.count(b"\n") == 3
    assert b'{"e":"alloc","id":1,"bytes":4194304,"tag":"input"}\n{"e":"step"}\n' in lines
    assert b'"name":"aten::relu","r":[1],"w":[]' in lines
    assert dropped == 0
    _core.record_stop("file")
    assert [type(event) for event in taken()] == []
    op("aten::relu", [a])
    assert [type(event) for event in taken()] == [Op]
    _core.release(a)


def test_what_an_open_op_may_still_change_is_not_written_yet() -> None:
    _core.record_start("file")
    token = _core.op_begin([], "conv", "forward", "aten::convolution")
    a = _core.allocate(4 * MIB)
    assert _core.record_lines("file", False)[0] == b""
    _core.op_end(token, "activation")
    assert b'"tag":"activation","family":"conv"' in _core.record_lines("file", False)[0]
    _core.release(a)


def test_a_forked_child_starts_a_recording_of_its_own() -> None:
    _core.record_start("plan")
    first = _core.allocate(4 * MIB)
    child = os.fork()
    if child == 0:
        second = _core.allocate(6 * MIB)  # while there is no recording
        _core.record_start("file")
        lines, dropped = _core.record_lines("file", final=True)
        alive = sorted(json.loads(line)["bytes"] for line in lines.splitlines())
        owned = _core.release(first) and _core.release(second)
        fine = alive == [4 * MIB, 6 * MIB] and owned and dropped == 0
        os._exit(0 if fine and _core.record_waiting("plan") == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    _core.release(first)
    assert [type(event) for event in taken()] == [Alloc, Free]


def test_steps_are_told_to_the_listener_and_nothing_it_raises_gets_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[str] = []
    monkeypatch.setattr("sys.unraisablehook", lambda what: raised.append(str(what.exc_value)))
    calls: list[int] = []

    def listener() -> None:
        calls.append(1)
        raise KeyError("of a listener")

    _core.set_step_listener(listener)
    _core.step()
    _core.set_step_listener(None)
    _core.step()
    assert calls == [1]
    assert raised == ["'of a listener'"]


def test_many_blocks_come_and_go() -> None:
    _core.record_start("plan")
    check, alive = Validator(), []
    for i in range(20_000):
        alive.append(_core.allocate(256 + i % 7 * 256))
        if i % 3:
            _core.release(alive.pop(i * 7919 % len(alive)))
        if i % 5 == 0:
            op("aten::add", [alive[i * 31 % len(alive)]])
    for event in taken():
        check.check(event)  # frees of live blocks only, reads of live blocks only
    assert len(check.live) == len(alive)
    for block in alive:
        _core.release(block)
    assert Step not in {type(event) for event in taken()}
