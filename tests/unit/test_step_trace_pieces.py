"""StepTrace.pieces: a step with large tensors cut into the pieces that move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from support.steptraces import PAGE, Op, Tensor, step

from umem.base.units import PIECE_BYTES
from umem.policies import registry
from umem.policies.base import Fetch, Move, Plan
from umem.policies.lowering import lower
from umem.trace.step_trace import Kind

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
    from support.steptraces import LINK

    plan = registry.make("auto").plan(trace, LINK, budget)
    assert plan is not None
    assert plan.trace.whole is not None
