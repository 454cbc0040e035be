"""Segments of small tensors as units of a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.steptraces import LINK, Op, Tensor, step, steps

from umem.base.units import MIB, PAGE_BYTES
from umem.policies import registry
from umem.policies.lowering import lower
from umem.trace.segments import with_segments
from umem.trace.step_trace import Ints, Kind, StepTrace

BASE = 64 * PAGE_BYTES


def at(*segments: int | None) -> Ints:
    """Addresses of tensors in these segments; None: not known."""
    return np.array([0 if s is None else BASE + s * PAGE_BYTES + 256 for s in segments], np.int64)


def rows(trace: StepTrace) -> list[tuple[int, Kind, int, int, int]]:
    """Segment, kind, first and last op, and next alias of each row that is a segment."""
    assert trace.place is not None
    return [
        ((int(trace.place[i]) - BASE) // PAGE_BYTES, Kind(trace.kind[i]), int(trace.first[i]),
         int(trace.last[i]), int(trace.next_alias[i]))
        for i in np.flatnonzero(trace.is_segment).tolist()
    ]  # fmt: skip


def accesses(trace: StepTrace) -> list[list[tuple[int, bool]]]:
    pairs = list(zip(trace.access_tensor.tolist(), trace.access_write.tolist(), strict=True))
    bounds = trace.access_start.tolist()
    return [sorted(pairs[a:b]) for a, b in itertools.pairwise(bounds)]


def test_tensors_of_a_segment_are_one_unit_after_the_large_ones() -> None:
    trace = step(
        [Tensor(0), Tensor(2), Tensor(0, life=(0, 1)), Tensor(0, life=(2, 3))],
        [Op(reads=[0], writes=[2]), Op(reads=[1, 2]), Op(writes=[3]), Op(reads=[0, 3])],
    )
    made = with_segments(trace, at(0, None, 1, 1))
    assert made.bytes.tolist() == [2 * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES]
    assert made.large.all()
    assert rows(made) == [(0, Kind.PERSISTENT, 0, 3, -1), (1, Kind.TRANSIENT, 0, 3, -1)]
    assert accesses(made) == [
        [(1, False), (2, True)],
        [(0, False), (2, False)],
        [(2, True)],
        [(1, False), (2, False)],
    ]
    assert made.allocations.tolist() == []  # by its place a segment is known, not by a turn


def test_an_op_that_allocates_in_a_segment_uses_it() -> None:
    trace = step([Tensor(0), Tensor(0, life=(1, 1))], [Op(reads=[0]), Op(reads=[0])])
    assert accesses(with_segments(trace, at(0, 1))) == [[(0, False)], [(0, False), (1, True)]]


def test_what_the_step_before_left_is_a_life_of_its_own() -> None:
    carried = Tensor(0, life=(0, 1), kind=Kind.CARRIED, next_alias=1)
    made = Tensor(0, life=(3, 4), kind=Kind.MADE)
    ops = [Op(reads=[0]), Op(reads=[0]), Op(reads=[2]), Op(writes=[1]), Op(reads=[1])]
    trace = with_segments(step([carried, made, Tensor(0)], ops), at(5, 5, 6))
    assert rows(trace) == [
        (5, Kind.MADE, 3, 4, -1),
        (6, Kind.PERSISTENT, 0, 4, -1),
        (5, Kind.CARRIED, 0, 1, 0),
    ]
    assert accesses(trace)[0] == [(2, False)]


def test_a_segment_that_is_never_empty_persists() -> None:
    carried = Tensor(0, life=(0, 3), kind=Kind.CARRIED, next_alias=1)
    made = Tensor(0, life=(2, 4), kind=Kind.MADE)
    ops = [Op(reads=[0]), Op(), Op(writes=[1]), Op(reads=[0]), Op(reads=[1])]
    trace = with_segments(step([carried, made], ops), at(5, 5))
    assert rows(trace) == [(5, Kind.PERSISTENT, 0, 4, -1)]


def test_a_tensor_without_an_address_stays_small() -> None:
    trace = step([Tensor(0), Tensor(0)], [Op(reads=[0, 1])])
    made = with_segments(trace, at(0, None))
    assert made.large.tolist() == [False, True]
    assert with_segments(trace, at(None, None)) is trace


@st.composite
def placed(draw: st.DrawFn) -> tuple[StepTrace, Ints]:
    trace = draw(steps())
    places: Sequence[int | None] = draw(
        st.lists(
            st.sampled_from([None, 0, 0, 1, 2]),
            min_size=trace.n_tensors,
            max_size=trace.n_tensors,
        )
    )
    return trace, at(*places)


@settings(max_examples=200)
@given(placed())
def test_any_step_with_segments_can_be_planned(case: tuple[StepTrace, Ints]) -> None:
    trace, address = case
    made = with_segments(trace, address)
    assert made.n_ops == trace.n_ops
    assert (made.first <= made.last).all()
    assert (made.first[made.access_tensor] <= made.access_op).all()
    assert (made.last[made.access_tensor] >= made.access_op).all()
    used = [set(row) for row in map(dict, accesses(made))]
    assert sum(map(len, used)) == len(made.access_tensor)  # each once an op
    alias = made.next_alias
    assert (made.kind[alias >= 0] == Kind.CARRIED).all()
    assert (made.kind[alias[alias >= 0]] == Kind.MADE).all()
    assert (made.bytes[alias >= 0] == made.bytes[alias[alias >= 0]]).all()
    if not made.large[made.access_tensor].any():
        return
    plan = registry.make("auto").plan(made, LINK, 16 * MIB)
    assert plan is not None
    columns: Any = lower(plan, lambda tensor: int(address[0]))
    assert len(columns["segment"]) == len(columns["address"])
