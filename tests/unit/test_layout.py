"""Layouts of steps: which tensors are placed, and lifetimes across the end of the step."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.steptraces import PAGE, Op, Tensor, step, steps, training

from umem.layout.layout import NO_PLACE, Layout, layout, resident
from umem.trace.step_trace import HostUpdates, Kind, StepTrace


def _alive(trace: StepTrace, tensor: int, op: int) -> bool:
    """In steady state: a tensor made in a step lives in the next one as its carried next_alias."""
    later = [t for t in range(trace.n_tensors) if trace.next_alias[t] == tensor]
    return any(trace.first[t] <= op <= trace.last[t] for t in (tensor, *later))


def _check(trace: StepTrace, made: Layout) -> list[int]:
    """Check that tensors that are alive together lie apart; return those with a place."""
    placed = [
        (int(t), int(at), int(size))
        for t, at, size in zip(made.tensor, made.offsets, made.sizes, strict=True)
        if at != NO_PLACE
    ]
    for (a, low, size), (b, other, more) in combinations(placed, 2):
        if any(_alive(trace, a, op) and _alive(trace, b, op) for op in range(trace.n_ops)):
            assert low + size <= other or other + more <= low
    assert all(at % PAGE == 0 and at + size <= made.bytes for _, at, size in placed)
    assert made.bytes >= made.load
    assert made.tensor.tolist() == trace.allocations.tolist()
    return [tensor for tensor, *_ in placed]


@settings(max_examples=150)
@given(trace=steps())
def test_tensors_that_are_alive_together_lie_apart(trace: StepTrace) -> None:
    _check(trace, layout(trace))


def test_weights_and_small_tensors_have_no_part_in_it() -> None:
    tensors = [Tensor(4), Tensor(0, (0, 0)), Tensor(3, (0, 0)), Tensor(2, (1, 1))]
    made = layout(step(tensors, [Op(writes=[2]), Op(writes=[3])]))
    assert made.tensor.tolist() == [2, 3]
    assert made.offsets.tolist() == [0, 0]
    assert made.bytes == made.load == 3 * PAGE


def test_a_training_step_takes_no_more_than_its_load() -> None:
    trace = training(12)
    made = layout(trace)
    assert made.bytes == made.load
    assert made.load == trace.peak_bytes - 12 * 2 * 4 * PAGE


def test_what_is_freed_in_the_next_step_keeps_its_place_until_then() -> None:
    tensors = [
        Tensor(2, (2, 2), kind=Kind.MADE),
        Tensor(2, (0, 0), kind=Kind.CARRIED, next_alias=0),
        Tensor(1, (0, 1)),
        Tensor(2, (1, 1)),
    ]
    made = layout(step(tensors, [Op(writes=[2]), Op(writes=[3]), Op(writes=[0])]))
    places = dict(zip(made.tensor.tolist(), made.offsets.tolist(), strict=True))
    assert set(places) == {0, 2, 3}
    assert made.bytes == made.load == 3 * PAGE
    assert places[2] not in range(places[0], places[0] + 2 * PAGE)


def test_what_lives_longer_than_a_step_has_no_place() -> None:
    tensors = [
        Tensor(2, (0, 1), kind=Kind.MADE),
        Tensor(2, (0, 0), kind=Kind.CARRIED, next_alias=0),
        Tensor(2, (1, 1), kind=Kind.MADE),  # its end is unknown
    ]
    trace = step(tensors, [Op(writes=[0]), Op(writes=[2])])
    made = layout(trace, guess=False)
    assert made.offsets.tolist() == [NO_PLACE, NO_PLACE]
    assert made.bytes == made.load == 0
    guessed = layout(trace)  # the last one is freed before the next step's first op
    assert guessed.offsets.tolist() == [NO_PLACE, 0]
    assert guessed.bytes == guessed.load == 2 * PAGE


# --- layouts whose memory stays --------------------------------------------------------------


@settings(max_examples=150)
@given(trace=steps(), pages=st.integers(1, 12))
def test_a_resident_layout_is_of_transient_tensors_and_within_its_limit(
    trace: StepTrace, pages: int
) -> None:
    made = resident(trace, [pages * PAGE], saved_us=1e9, bytes_per_us=1e3)
    may = [
        int(t) for t in trace.allocations
        if trace.kind[t] == Kind.TRANSIENT and trace.bytes[t] <= pages * PAGE
        and trace.last[t] - trace.first[t] < max(trace.n_ops // 8, 1)
    ]  # fmt: skip
    if made is None:
        assert not may
        return
    placed = _check(trace, made)
    assert made.bytes <= pages * PAGE
    assert placed
    assert set(placed) <= set(may)
    pieces, moving = trace.pieces, made.without(trace)
    assert pieces.whole is not None
    for piece, tensor in enumerate(pieces.whole.tolist()):
        assert moving.bytes[piece] == (0 if tensor in placed else pieces.bytes[piece])
        assert moving.large[piece] == (pieces.large[piece] and tensor not in placed)


def brief(life: int = 2) -> StepTrace:
    """16 ops of 1 ms, each with a tensor of a page; and one of two pages for some of the ops."""
    tensors = [Tensor(1, (i, i)) for i in range(16)] + [Tensor(2, (0, life - 1))]
    return step(tensors, [Op(writes=[i], us=1000.0) for i in range(16)])


def test_the_briefest_tensors_are_placed_first() -> None:
    trace = brief()
    made = resident(trace, [PAGE], saved_us=1.0, bytes_per_us=1e9)
    assert made is not None
    assert _check(trace, made) == [*range(16)]
    assert made.bytes == made.load == PAGE
    for life, all_of_them in ((2, 17), (3, 16)):  # an eighth of the ops is brief
        larger = resident(brief(life), [PAGE, 3 * PAGE], saved_us=1.0, bytes_per_us=1e9)
        assert larger is not None
        assert sorted(_check(trace, larger)) == [*range(all_of_them)]


def test_a_layout_that_would_be_idle_costs_more_than_it_saves() -> None:
    trace = brief()
    # Three of four pages are idle: that many bytes out and in, twice.
    cost = 4 * 3 * PAGE / 1000.0 / 16
    limits = [4 * PAGE]
    pinned = replace(trace, exempt=np.arange(trace.n_tensors) == 16)
    assert resident(pinned, limits, saved_us=cost - 1, bytes_per_us=1000.0) is None
    made = resident(pinned, limits, saved_us=cost + 1, bytes_per_us=1000.0)
    assert made is not None
    assert _check(trace, made) == [*range(16)]


def test_what_the_host_updates_with_is_not_placed() -> None:
    updates = HostUpdates(np.array([-1]), np.array([0]), np.array([1.0]))
    made = resident(replace(brief(), updates=updates), [PAGE], saved_us=1.0, bytes_per_us=1e9)
    assert made is not None
    assert _check(brief(), made) == [*range(1, 16)]
