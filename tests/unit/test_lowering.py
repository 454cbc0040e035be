"""Plans in the columns that the native engine reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umem.policies.base import Entries, Fetch, Move, Plan
from umem.policies.lowering import NothingToPlanError, lower
from umem.trace.step_trace import Kind, StepTrace

PAGE = 2 << 20
P, T, M, C = Kind.PERSISTENT, Kind.TRANSIENT, Kind.MADE, Kind.CARRIED


def trace(
    ops: Sequence[Sequence[int]],
    kinds: Sequence[int],
    *,
    small: Sequence[int] = (),
    first: dict[int, int] | None = None,
    next_alias: dict[int, int] | None = None,
) -> StepTrace:
    m = len(kinds)
    large = np.array([t not in small for t in range(m)])
    counts = [len(op) for op in ops]
    accesses = np.array([t for op in ops for t in op], np.int64)
    return StepTrace(
        op_us=np.ones(len(ops)),
        op_names=("op",) * len(ops),
        bytes=np.where(large, PAGE * (1 + np.arange(m)), 256),
        large=large,
        tags=("",) * m,
        families=("",) * m,
        kind=np.array(kinds, np.int64),
        first=np.array([(first or {}).get(t, 0) for t in range(m)], np.int64),
        last=np.full(m, len(ops) - 1),
        next_alias=np.array([(next_alias or {}).get(t, -1) for t in range(m)], np.int64),
        source=np.arange(m),
        access_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        access_tensor=accesses,
        access_write=np.zeros(len(accesses), bool),
    )


def nowhere(tensor: int) -> int:
    return 0


def test_small_tensors_and_what_is_said_of_them_are_left_out() -> None:
    step = trace([[0, 1], [1, 2], [2]], [P, P, P], small=[1])
    plan = Plan(
        step,
        evict=(Move(0, 1), Move(1, 2)),
        evict_first=(Move(0, 1),),
        fetch=(Fetch(0, 2, 1), Fetch(1, 3, 0)),
        retain=(1, 2),
    )
    columns = lower(plan, lambda t: 1000 + t)
    assert columns["n_ops"] == 3
    expected = {
        "bytes": [PAGE, 3 * PAGE],
        "address": [1000, 1002],
        "access_start": [0, 1, 2, 3],
        "access_tensor": [0, 1, 1],
        "evict_after": [1],
        "evict_tensor": [1],
        "cold_after": [],
        "fetch_after": [1],
        "fetch_by": [3],
        "fetch_tensor": [0],
        "keep": [1],
    }
    for name, values in expected.items():
        column = columns[name]
        assert isinstance(column, np.ndarray)
        assert column.dtype == np.int64
        assert column.tolist() == values, name


def test_what_comes_after_an_op_that_does_not_count_waits_for_the_next_that_does() -> None:
    # Ops 0, 3 and 4 use small tensors only, or none.
    step = trace([[1], [0], [0], [], [1]], [P, P], small=[1])
    plan = Plan(
        step,
        evict=tuple(Move(after, 0) for after in range(-1, 5)),
        barriers=(-1, 3),
        gated=True,
        occupancy=np.array([9, 1, 2, 7, 3], np.int64),
        capacity=10,
    )
    columns: Any = lower(plan, nowhere)
    assert columns["n_ops"] == 2
    assert columns["evict_after"].tolist() == [-1, 0, 0, 1, 1, 1]
    assert columns["waits"].tolist() == [-1, 1]
    assert columns["occupancy"].tolist() == [9, 7]


def test_fetches_for_the_next_step() -> None:
    step = trace([[1], [0], [2], [0]], [P, P, P], small=[1])
    fetches = (Fetch(3, 5, 0), Fetch(2, 6, 2), Fetch(-1, 1, 0), Fetch(0, 1, 0))
    columns: Any = lower(Plan(step, fetch=fetches), nowhere)
    rows = zip(
        *(columns[f"fetch_{name}"].tolist() for name in ("after", "by", "tensor")),
        strict=True,
    )
    # The last one would start at the end of the op that it is for.
    assert list(rows) == [(2, 3, 0), (1, 4, 1), (-1, 0, 0)]


def test_allocations_in_their_order() -> None:
    kinds = [P, T, C, M, T, C, T]
    first = {1: 2, 3: 1, 4: 1, 6: 0}
    step = trace([[0], [0], [0]], kinds, small=[4], first=first, next_alias={2: 3})
    columns: Any = lower(Plan(step), lambda t: 7 * t + 1)
    # Number 4 of 0 to 6 is small; number 5 is carried from nowhere: it exists at a step's start.
    assert columns["allocations"].tolist() == [5, 3, 1]
    alone: Any = lower(Plan(step), lambda t: 7 * t + 1, alone=True)
    assert alone["allocations"].tolist() == [4, 5, 3, 1]
    assert columns["next_alias"].tolist() == [-1, -1, 3, -1, -1, -1]
    assert columns["address"].tolist() == [1, 0, 15, 0, 36, 0]


def test_a_trace_without_large_tensors_has_no_plan() -> None:
    with pytest.raises(NothingToPlanError, match="2 MiB"):
        lower(Plan(trace([[0]], [P], small=[0])), nowhere)


@given(
    ops=st.lists(st.lists(st.integers(0, 5), max_size=3, unique=True), min_size=1, max_size=12),
    small=st.sets(st.integers(0, 5)),
    data=st.data(),
)
def test_the_map_of_ops_keeps_the_order(
    ops: list[list[int]], small: set[int], data: st.DataObject
) -> None:
    step = trace(ops, [P] * 6, small=sorted(small))
    counted = [i for i, op in enumerate(ops) if any(t not in small for t in op)]
    if not counted:
        return
    large = [t for t in range(6) if t not in small]
    moves = data.draw(
        st.lists(st.tuples(st.integers(-1, len(ops) - 1), st.sampled_from(large)), max_size=9)
    )
    columns = lower(Plan(step, evict=tuple(Move(*move) for move in moves)), nowhere)
    after = columns["evict_after"]
    assert isinstance(after, np.ndarray)
    for (op, _), found in zip(moves, after.tolist(), strict=True):
        due = [i for i, j in enumerate(counted) if j >= op]
        assert found == (-1 if op < 0 else due[0] if due else len(counted) - 1)


def test_twenty_thousand_tensors_in_a_moment() -> None:
    n = 20_000
    ops = [[i, (i * 7) % n] if i else [0] for i in range(n)]
    step = replace(trace(ops, [P] * n), bytes=np.full(n, PAGE))
    moves = tuple(Move(i, i) for i in range(n))
    fetches = tuple(Fetch(i, i + n - 1, i) for i in range(n))
    plan = Plan(step, evict=moves, fetch=fetches, gated=True, occupancy=np.zeros(n, np.int64))
    begin = time.process_time()
    columns: Any = lower(plan, nowhere)
    assert time.process_time() - begin < 1.5  # about 0.05 s on an idle core
    assert len(columns["fetch_by"]) == n


def test_entries_in_columns_are_as_those_one_by_one() -> None:
    moves = [Move(0, 3), Move(1, 2), Move(4, 0)]
    entries = Entries(Move, *np.array(moves).T)
    assert entries == tuple(moves)
    assert list(entries) == [*entries[:]] == moves
    assert (entries[0], entries[-1], entries[1:]) == (moves[0], moves[-1], tuple(moves[1:]))
    assert len(entries) == 3
    assert Move(1, 2) in entries
    assert not Entries(Fetch, *np.zeros((3, 0), np.int64))
    assert np.asarray(entries).tolist() == [[0, 3], [1, 2], [4, 0]]
