"""Layouts of steps: which tensors are placed, and lifetimes across the end of the step."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from support.steptraces import PAGE, Op, Tensor, step, steps, training

from umem.layout.layout import NO_PLACE, layout
from umem.trace.step_trace import Kind, StepTrace


def _alive(trace: StepTrace, tensor: int, op: int) -> bool:
    """In steady state: a tensor made in a step lives in the next one as its carried next_alias."""
    later = [t for t in range(trace.n_tensors) if trace.next_alias[t] == tensor]
    return any(trace.first[t] <= op <= trace.last[t] for t in (tensor, *later))


@settings(max_examples=150, deadline=None)
@given(trace=steps())
def test_tensors_that_are_alive_together_lie_apart(trace: StepTrace) -> None:
    made = layout(trace)
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
