"""Victim callbacks: Python policies that choose the blocks to evict."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from support.planned import MIB, Program, options, running

from umem import _core
from umem.policies.base import CandidateView
from umem.policies.victim_callback import Victims, victim_callback


@pytest.fixture
def program() -> Iterator[Program]:
    with running(options(policy="lru")) as made:
        yield made
        _core.set_advisor(None)


def ask(victims: Victims) -> None:
    _core.set_advisor(victim_callback(victims, "mine"))


def newest(view: CandidateView, need: int) -> list[int]:
    return [block.id for block in reversed(view.blocks)]


def ignored() -> int:
    return _core.stats()["advice_ignored"]


def test_who_it_names_leaves_first(program: Program) -> None:
    for name in "abcd":
        program.take(name)
    ask(newest)
    program.take("e", 8)
    assert program.away() == {"c", "d"}
    program.op("c")
    assert program.away() == {"d", "e"}
    assert ignored() == 0


def test_what_is_pinned_stays_whoever_names_it(program: Program) -> None:
    ids: list[int] = []

    def none_of(view: CandidateView, need: int) -> list[int]:
        ids.extend(block.id for block in view.blocks)
        return []

    for name in "abcd":
        program.take(name)
    ask(none_of)
    program.take("e")
    assert program.away() == {"a"}
    number = _core.hold([(program.at["b"], 1)], "pin", ["b"])
    ask(lambda view, need: ids[1:3])
    program.take("f")
    assert program.away() == {"a", "c"}
    assert ignored() == 1
    _core.unhold(number)


def test_what_it_sees(program: Program) -> None:
    token = _core.op_begin([], "conv", "forward")
    program.take("a")
    _core.op_end(token, "activation")
    program.take("b", 6)
    program.take("c")
    program.op("b")
    _core.op_end(_core.op_begin([], "", ""), "")
    seen: list[tuple[CandidateView, int]] = []

    def victims(view: CandidateView, need: int) -> list[int]:
        seen.append((view, need))
        return []

    ask(victims)
    program.take("d", 3)
    [(view, need)] = seen
    assert need == 2 * MIB  # 14 of 16 MiB are taken, and 4 needed
    assert (view.resident_bytes, view.budget_bytes) == (14 * MIB, 16 * MIB)
    assert [block.bytes for block in view.blocks] == [4 * MIB, 4 * MIB, 6 * MIB]
    assert [block.tag for block in view.blocks] == ["activation", "input", "input"]
    assert view.blocks[0].family == "conv"
    assert not any(block.segment for block in view.blocks)
    uses = [block.last_use for block in view.blocks]
    assert uses == sorted(set(uses))
    assert program.away() == {"a"}  # it named none: the least recently used


def test_it_is_not_asked_about_what_the_op_uses(program: Program) -> None:
    for name in "abcde":
        program.take(name)
    assert program.away() == {"a"}
    seen: list[set[int]] = []

    def victims(view: CandidateView, need: int) -> list[int]:
        seen.append({block.id for block in view.blocks})
        return newest(view, need)

    ask(victims)
    program.op("e", "a")
    assert [len(ids) for ids in seen] == [3]
    assert program.away() == {"d"}


def test_it_is_asked_only_when_room_is_short(program: Program) -> None:
    calls: list[int] = []

    def victims(view: CandidateView, need: int) -> list[int]:
        calls.append(need)
        return []

    ask(victims)
    for name in "abcd":
        program.take(name)
        program.op(name)
    program.drop("a")
    program.take("a", 2)  # a dead block counts as free too
    assert calls == []
    program.take("e")
    assert calls == [2 * MIB]
    _core.set_advisor(None)
    program.take("f")
    assert len(calls) == 1


WRONG = [
    ([0, 999_999, -5, 1 << 80], 4),
    ((i for i in [0]), 1),
    ("", 0),
]


@pytest.mark.parametrize(("ids", "count"), WRONG)
def test_ids_of_nothing_are_ignored(program: Program, ids: Iterable[int], count: int) -> None:
    for name in "abcd":
        program.take(name)
    ask(lambda view, need: ids)
    program.take("e")
    assert program.away() == {"a"}
    assert ignored() == count


def test_the_same_block_twice_leaves_once(program: Program) -> None:
    for name in "abcd":
        program.take(name)
    ask(lambda view, need: [view.blocks[2].id, view.blocks[2].id])
    program.take("e", 8)
    assert program.away() == {"a", "c"}
    assert ignored() == 1


@pytest.mark.parametrize(
    "bad", [lambda v, n: 1 // 0, lambda v, n: 5, lambda v, n: ["x"], lambda v: []]
)
def test_what_it_raises_is_told_once(
    program: Program, monkeypatch: pytest.MonkeyPatch, bad: Victims
) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    for name in "abcd":
        program.take(name)
    ask(bad)
    program.take("e")
    program.take("f")
    assert len(told) == 1
    assert program.away() == {"a", "b"}
    ask(bad)  # another time is another one
    program.take("g")
    assert len(told) == 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "victims returned None; allowed: ids of view.blocks"),
        (5, "victims returned an int;"),
        ([1.0], "victims returned a list with a float;"),
        ("ab", "victims returned a str with a str;"),
    ],
)
def test_an_answer_that_is_no_ids_names_the_policy(answer: Any, words: str) -> None:
    rows = [(i, 4 * MIB, "activation", "conv", i, False) for i in range(2)]
    with pytest.raises(TypeError, match=f"policy mine: {words}"):
        victim_callback(lambda *_: answer, "mine")(rows, 0, 0, 0)


def test_an_endless_answer_ends(program: Program) -> None:
    for name in "abcd":
        program.take(name)
    ask(lambda view, need: itertools.repeat(view.blocks[1].id))
    program.take("e")
    assert program.away() == {"b"}


def test_it_may_use_umem_itself_and_is_not_asked_meanwhile(program: Program) -> None:
    for name in "abcd":
        program.take(name)
    depth: list[int] = []

    def victims(view: CandidateView, need: int) -> list[int]:
        depth.append(1)
        _core.release(_core.allocate(6 * MIB))  # short of memory as well
        return [view.blocks[-1].id]

    ask(victims)
    program.take("e")
    assert depth == [1]


def test_it_must_be_a_function(program: Program) -> None:
    with pytest.raises(TypeError, match="function"):
        _core.set_advisor(5)  # type: ignore[arg-type]


def test_other_threads_free_memory_with_the_interpreter_locked_meanwhile() -> None:
    """In its own process: a deadlock is a time-out here, not a hanging test run."""
    code = """
        import ctypes, threading
        from support.planned import MIB, options
        from umem import _core
        from umem.policies.victim_callback import victim_callback

        _core.start(options(policy="lru"))
        stop = threading.Event()
        # PyDLL keeps the interpreter's lock in the call, as a tensor that dies does.
        free = ctypes.PyDLL(str(__import__("pathlib").Path(_core.__file__).with_name("libumem.so")))
        free = free.umem_free
        free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        calls = []

        def victims(view, need):
            calls.append(need)
            for _ in range(50):
                sum(range(50))  # the other threads get the interpreter here
            return [block.id for block in reversed(view.blocks)]

        def churn():
            while not stop.is_set():
                for ptr in [_core.allocate(4 * MIB) for _ in range(3)]:
                    free(ptr, 4 * MIB, 0, None)

        _core.set_advisor(victim_callback(victims, "mine"))
        threads = [threading.Thread(target=churn) for _ in range(4)]
        kept = [_core.allocate(4 * MIB) for _ in range(6)]
        for thread in threads:
            thread.start()
        for i in range(300):
            _core.op_end(_core.op_begin([kept[i % 6]], "", ""), "")
        stop.set()
        for thread in threads:
            thread.join()
        for ptr in kept:
            _core.release(ptr)
        assert len(calls) > 100, len(calls)
        _core.stop()
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout == "done\n", done.stderr


def test_the_callback_is_not_called_once_the_interpreter_ends() -> None:
    code = """
        import atexit, threading
        from support.planned import MIB, options
        from umem import _core

        _core.start(options(policy="lru"))
        asked = []
        late = lambda: [_core.allocate(4 * MIB) for _ in range(8)] and print(len(asked))
        atexit.register(late)  # runs after what set_advisor registers
        _core.set_advisor(lambda rows, resident, budget, need: asked.append(need) or [])
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


def test_what_it_costs(program: Program) -> None:
    """Prints ns; asserts only that it measures the stated calls."""
    for name in "abcde":
        program.take(name)
    outer = _core.op_begin([program.at[name] for name in "bcde"], "", "")

    def cycle(times: int = 500) -> float:
        begin = time.perf_counter_ns()
        for _ in range(times):
            _core.op_end(_core.op_begin([program.at["a"]], "", ""), "")  # it does not fit
        return (time.perf_counter_ns() - begin) / times

    calls: list[int] = []

    def nobody(view: CandidateView, need: int) -> list[int]:
        calls.append(need)
        return []

    plain = cycle()
    ask(nobody)
    asked = cycle()
    _core.op_end(outer, "")
    assert len(calls) == 500
    rows = [(i, 4 * MIB, "activation", "conv", i, False) for i in range(1000)]
    called = victim_callback(nobody, "mine")
    begin = time.perf_counter_ns()
    for _ in range(20):
        called(rows, 0, 0, 0)
    block = (time.perf_counter_ns() - begin) / 20_000
    print(f"a call: {asked - plain:.0f} ns; and for each block that may leave: {block:.0f} ns")
