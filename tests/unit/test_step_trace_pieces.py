"""StepTrace.pieces: a step with large tensors cut into the pieces that move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import bounds_lp
from support.steptraces import LINK, PAGE, Op, Tensor, step

from umem.analysis import bounds
from umem.base.units import PIECE_BYTES
from umem.policies import registry
from umem.policies.base import Fetch, Move, Plan
from umem.policies.lowering import lower
from umem.simulation.replay import replay_step
from umem.trace import step_trace
from umem.trace.step_trace import Kind, Parts, StepTrace

PAGES = PIECE_BYTES // PAGE


def large_step() -> Any:
    tensors = [
        Tensor(2 * PAGES + 3),  # three pieces
        Tensor(0),
        Tensor(PAGES),  # one, just so
        Tensor(PAGES + 1, life=(2, 3), kind=Kind.MADE),
        Tensor(PAGES + 1, life=(0, 1), kind=Kind.CARRIED, next_alias=3),
    ]
    ops = [
        Op(reads=[0, 1, 4]),
        Op(reads=[2], writes=[1]),
        Op(reads=[2], writes=[3, 0]),
        Op(reads=[0, 3]),
    ]
    return step(tensors, ops)


def test_pieces_follow_each_other_and_sum_up() -> None:
    trace = large_step()
    cut = trace.pieces
    assert cut.whole.tolist() == [0, 0, 0, 1, 2, 3, 3, 4, 4]
    assert cut.offset.tolist() == [
        0,
        PIECE_BYTES,
        2 * PIECE_BYTES,
        0,
        0,
        0,
        PIECE_BYTES,
        0,
        PIECE_BYTES,
    ]
    assert (cut.bytes[cut.large] <= PIECE_BYTES).all()
    assert np.bincount(cut.whole, cut.bytes).tolist() == trace.bytes.tolist()
    assert cut.next_alias.tolist() == [-1, -1, -1, -1, -1, -1, -1, 5, 6]


def test_every_op_uses_all_pieces_of_what_it_used() -> None:
    trace = large_step()
    cut = trace.pieces
    for op in range(trace.n_ops):
        here = slice(trace.access_start[op], trace.access_start[op + 1])
        there = slice(cut.access_start[op], cut.access_start[op + 1])
        expected = [
            (piece, bool(write))
            for tensor, write in zip(
                trace.access_tensor[here], trace.access_write[here], strict=True
            )
            for piece in np.flatnonzero(cut.whole == tensor)
        ]
        got = list(zip(cut.access_tensor[there], cut.access_write[there].tolist(), strict=True))
        assert got == expected


def test_every_piece_is_overwritten_where_its_tensor_is() -> None:
    trace = large_step()
    read = np.arange(len(trace.access_tensor)) % 2 == 0
    cut = replace(trace, access_read=read).pieces
    at = np.cumsum(np.bincount(cut.whole)[trace.access_tensor]) - 1  # the last piece of each access
    assert cut.access_read[at].tolist() == read.tolist()
    assert trace.pieces.access_read is None


def parts_of(trace: Any, of: dict[int, list[tuple[int, int]]], **changes: Any) -> Any:
    """The step with these accesses, by their index, on ranges of bytes only."""
    rows = [row for ranges in of.values() for row in ranges]
    part = np.full(len(trace.access_tensor), -1)
    part[list(of)] = np.arange(len(of))
    start = np.cumsum([0, *map(len, of.values())])
    begin, end = np.array(rows).T
    return replace(trace, access_part=part, parts=Parts(start, begin, end), **changes)


def test_an_access_to_a_part_is_one_to_the_pieces_that_hold_some_of_it() -> None:
    trace = large_step()  # accesses: 0, 1, 4; 2, 1; 2, 3, 0; 0, 3
    whole = trace.pieces
    last = 2 * PIECE_BYTES
    cut = parts_of(trace, {0: [(0, 1), (last - 1, last)], 7: [(last, last + 5)]}).pieces
    assert cut.whole.tolist() == whole.whole.tolist()
    of_op = [cut.access_tensor[cut.access_start[i] : cut.access_start[i + 1]] for i in range(4)]
    assert [pieces.tolist() for pieces in of_op] == [
        [0, 1, 3, 7, 8], [4, 3], [4, 5, 6, 2], [0, 1, 2, 5, 6]
    ]  # fmt: skip
    cut = parts_of(trace, {8: [(last, last + 5)]}).pieces
    assert cut.access_tensor[cut.access_start[3] :].tolist() == [2, 5, 6]
    assert (cut.working_set <= trace.working_set).all()
    assert cut.working_set[3] == trace.working_set[3] - last


def test_tensors_are_cut_as_finely_as_the_step_says() -> None:
    trace = large_step()
    size = np.array([PIECE_BYTES, PIECE_BYTES, PIECE_BYTES, 8 * PAGE, 8 * PAGE])
    cut = replace(trace, cut=size).pieces
    counts = np.bincount(cut.whole).tolist()
    assert counts == [3, 1, 1, PAGES // 8 + 1, PAGES // 8 + 1]
    assert np.bincount(cut.whole, cut.bytes).tolist() == trace.bytes.tolist()
    made, carried = np.flatnonzero(cut.whole == 3), np.flatnonzero(cut.whole == 4)
    assert cut.next_alias[carried].tolist() == made.tolist()
    assert cut.offset[made].tolist() == [i * 8 * PAGE for i in range(len(made))]
    plan = Plan(replace(trace, cut=size), evict=(Move(0, 4),))
    columns = lower(plan, {0: 1 << 40, 2: 1 << 41, 4: 1 << 42}.__getitem__)
    assert columns["cut"].tolist() == [(PAGES + 1) * PAGE]
    assert lower(Plan(trace), {0: 1 << 40, 2: 1 << 41, 4: 1 << 42}.__getitem__)["cut"].size == 0


def test_bounds_need_of_a_tensor_what_ops_use_of_it() -> None:
    pages = 32 * 4
    tensors = [Tensor(pages), Tensor(pages)]
    trace = step(tensors, [Op(reads=[t]) for _ in range(4) for t in (0, 1)])
    quarter = pages * PAGE // 4
    fine = np.full(2, 8 * PAGE)
    parts = {a: [(a // 2 * quarter, (a // 2 + 1) * quarter)] for a in range(8)}
    in_parts = parts_of(trace, parts, cut=fine)
    assert bounds.largest_op(in_parts).bytes == quarter
    assert bounds.largest_op(trace).bytes == 4 * quarter
    budget = 4 * quarter
    # Each quarter of each is fetched once a step, and half of all can stay.
    assert 0 < bounds.lower_bound_bytes_in(in_parts, budget) <= 8 * quarter
    assert bounds.lower_bound_bytes_in(trace, budget) == 8 * 4 * quarter
    found = replay_step(in_parts, "auto", LINK, budget)
    assert found.bound_bytes_in <= found.bytes_in <= 8 * quarter
    assert replay_step(trace, "auto", LINK, budget).bytes_in >= 28 * quarter


@st.composite
def steps_in_parts(draw: st.DrawFn) -> StepTrace:
    """A step whose ops use parts of a few blocks, some of which are made in it."""
    sizes = draw(st.lists(st.integers(2, 12), min_size=2, max_size=4))
    n = draw(st.integers(3, 12))
    tensors = [Tensor(pages, None if draw(st.booleans()) else (0, n - 1)) for pages in sizes]
    ops, parts = [], {}
    for _ in range(n):
        used = draw(
            st.lists(st.sampled_from(range(len(sizes))), min_size=1, max_size=2, unique=True)
        )
        written = [t for t in used if draw(st.booleans())]
        ops.append(Op(reads=used, writes=written))
        for t in used:
            begin = draw(st.integers(0, sizes[t] * PAGE - 1))
            if draw(st.integers(0, 3)):
                parts[sum(len(op.touched) for op in ops[:-1]) + used.index(t)] = [
                    (begin, draw(st.integers(begin + 1, sizes[t] * PAGE)))
                ]
    if not parts:
        parts[0] = [(0, 1)]
    fine = draw(st.sampled_from((PAGE, 2 * PAGE, PIECE_BYTES)))
    made: StepTrace = parts_of(step(tensors, ops), parts, cut=np.full(len(sizes), fine))
    return made


@settings(max_examples=40)
@given(steps_in_parts(), st.sampled_from(("auto", "lru", "belady")))
def test_no_schedule_of_parts_is_below_the_bound(trace: StepTrace, policy: str) -> None:
    needed = int(trace.working_set.max())
    whole = replace(trace, access_part=None, parts=None)
    assert (trace.working_set <= whole.working_set).all()
    found = replay_step(trace, policy, LINK, max(needed, 8 * PAGE))
    assert found.bound_bytes_in <= found.bytes_in


def test_figures_of_the_step_stay() -> None:
    trace = large_step()
    cut = trace.pieces
    assert cut.pieces is cut
    assert cut.peak_bytes == trace.peak_bytes
    assert cut.small_bytes == trace.small_bytes
    assert cut.live_bytes.tolist() == trace.live_bytes.tolist()
    assert cut.working_set.tolist() == trace.working_set.tolist()


def test_a_plan_of_whole_tensors_is_done_to_their_pieces() -> None:
    trace = large_step()
    plan = Plan(trace, evict=(Move(0, 0),), fetch=(Fetch(0, 2, 0),), retain=(2,))
    base = {0: 1 << 40, 2: 1 << 41, 4: 1 << 42}
    columns = lower(plan, base.__getitem__)
    assert columns["evict_tensor"].tolist() == [0, 1, 2]
    assert columns["fetch_tensor"].tolist() == [0, 1, 2]
    assert columns["keep"].tolist() == [3]  # of the large pieces
    offsets = [0, PIECE_BYTES, 2 * PIECE_BYTES]
    assert columns["address"].tolist() == [
        *(base[0] + offset for offset in offsets),
        base[2],
        0,
        0,
        base[4],
        base[4] + PIECE_BYTES,
    ]


def test_the_default_policy_plans_by_the_piece() -> None:
    trace = large_step()
    budget = int(trace.working_set.max()) + 4 * PAGE
    plan = registry.make("auto").plan(trace, LINK, budget)
    assert plan is not None
    assert plan.trace.whole is not None


@settings(max_examples=40)
@given(steps_in_parts())
def test_the_largest_op_needs_the_pieces_that_it_uses(trace: StepTrace) -> None:
    exact, whole = trace.in_exact_parts, replace(trace, access_part=None, parts=None)
    parts, pieces, tensors = (
        step.sum_of_accesses(np.where(step.large, step.bytes, 0)).max()
        for step in (exact, trace.pieces, whole)
    )
    assert parts <= bounds.largest_op(trace).bytes == pieces <= tensors


def test_an_op_that_uses_parts_needs_all_of_their_pieces() -> None:
    trace = step([Tensor(30) for _ in range(4)], [Op(reads=[0, 1, 2, 3])])
    trace = parts_of(trace, {access: [(0, 16 * PAGE)] for access in range(4)})
    assert bounds.largest_op(trace).bytes == 4 * 30 * PAGE
    assert replay_step(trace, "lru", LINK, bounds.min_budget(trace)).faults == 0


@settings(max_examples=40)
@given(steps_in_parts())
def test_ops_that_use_all_of_their_tensors_bound_no_less(trace: StepTrace) -> None:
    whole = replace(trace, access_part=None, parts=None)
    budget = int(whole.working_set.max())
    assert bounds.lower_bound_bytes_in(trace, budget) <= optimum(whole, budget)


def optimum(trace: StepTrace, budget: int) -> float:
    """The least bytes in, and the solver's tolerance.

    Bounds in closed form are at most that, and no more can be said of those of two like steps: a
    step that moves less may have the higher bound, as fewer of its gaps span two cuts.
    """
    pytest.importorskip("highspy", reason="the optimum needs highspy")
    return bounds_lp.lp_bytes_in(trace, budget) * (1 + 2e-6) + 2


@settings(max_examples=40)
@given(steps_in_parts())
@example(
    parts_of(  # cuts at 3 and 6 add up, unless the third block's gap, which spans both, is seen
        step(
            [Tensor(2, (0, 10)), Tensor(3, (0, 10)), Tensor(2)],
            [
                Op(reads=uses)
                for uses in [[0]] * 3 + [[0, 1], [0], [0], [0, 2]] + [[0]] * 3 + [[1, 2]]
            ],
        ),
        {3: [(0, 1)], 8: [(0, 1)], 13: [(2, 3)]},
        cut=np.full(3, PAGE),
    )
)
def test_a_division_at_fewer_places_bounds_what_a_schedule_may_move(trace: StepTrace) -> None:
    """A tensor used in very many parts is divided at some of them."""
    budget = bounds.min_budget(trace)
    least = optimum(trace, budget)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_trace, "_ROWS_OF_PIECES", 1)
        patched.setattr(step_trace, "_PIECES_AT_LEAST", 2)
        fewer = replace(trace)  # without cached columns
        assert (np.bincount(fewer.in_exact_parts.whole) <= 3).all()  # the first begins at 0
        assert bounds.lower_bound_bytes_in(fewer, budget) <= least
        assert bounds.largest_op(fewer) == bounds.largest_op(trace)
