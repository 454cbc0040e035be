"""The largest batch within a budget, predicted from two batches and verified."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.steps import Tensor, make_step

from umem.analysis import formulas
from umem.analysis.batch_size import (
    MOST,
    Line,
    TensorLines,
    alike,
    largest_batch,
    line,
    tensor_lines,
)
from umem.base.units import MIB
from umem.cli.estimate_text import EstimateAnswer, render
from umem.errors import PlanError
from umem.trace.step_part import device_bytes, on_device
from umem.trace.step_trace import Kind


def test_the_line_and_what_it_says() -> None:
    """M(b) = m0 + b m1; the largest is the floor of (budget - m0) / m1."""
    found = line((32, 5_000), (8, 2_000))
    assert found == Line(1_000, 125)
    assert found.at(10) == 2_250
    assert [found.largest(budget) for budget in (2_249, 2_250, 2_374, 2_375)] == [9, 10, 10, 11]
    assert found.largest(10) == 0
    assert found.largest(10**18) == MOST


@pytest.mark.parametrize("points", [((8, 5), (8, 7)), ((8, 5), (16, 5)), ((8, 5), (16, 4))])
def test_no_line(points: tuple[tuple[int, int], tuple[int, int]]) -> None:
    with pytest.raises(PlanError, match="does the program use its batch"):
        line(*points)


def test_a_line_is_verified_by_two_batches() -> None:
    found = largest_batch(lambda batch: 1_000 + 10 * batch, 4_321)
    assert found.batch == found.predicted == 332
    assert list(found.needs) == [8, 16, 332, 334]
    assert not found.modelled
    assert found.sample == 10


def test_where_small_batches_peak_elsewhere_the_prediction_is_corrected() -> None:
    found = largest_batch(lambda batch: max(5_000, 1_000 + 10 * batch), 6_005)
    assert found.batch == 500
    assert found.needs[500] == 6_000
    assert len(found.needs) < 20


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (100_000, "traced: 99 fits, 100 does not fit"),
        (10_000_000, "traced: 9999 fits, 10039 does not fit"),  # within 1/256
        (1 << 40, f"traced: {MOST} fits, no larger one is tried"),
    ],
)
def test_the_answer_names_the_batches_that_were_traced(budget: int, words: str) -> None:
    fit = largest_batch(lambda batch: 1000 + batch * 1000, budget)
    found = formulas.estimate(formulas.Config(params=1000))
    answer = EstimateAnswer("program", None, fit.batch, "an op", found, budget, fit)
    *_, last = render(answer).splitlines()
    assert last.endswith(words)


def test_memory_that_does_not_grow_is_an_error() -> None:
    with pytest.raises(PlanError, match="does the program use its batch"):
        largest_batch(lambda batch: 1_000, 2_000)


@given(
    st.integers(1, 10**9), st.integers(1, 10**7), st.integers(0, 10**10), st.integers(1, 10**11),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_what_is_found_fits_and_little_more_does_not(
    fixed: int, sample: int, other: int, budget: int, random: object
) -> None:
    def need(batch: int) -> int:  # the peak of two ops, with pages
        return -(-max(fixed + batch * sample, other) // 4096) * 4096

    try:
        found = largest_batch(need, budget)
    except PlanError:
        assert need(4096) == need(2048)
        return
    assert found.batch == 0 or need(found.batch) <= budget
    more = found.batch + 1 + found.batch // 256
    assert more > MOST or need(more) > budget
    assert found.needs == {batch: need(batch) for batch in found.needs}


def test_a_step_may_refuse_a_batch_of_1() -> None:
    def need(batch: int) -> int:
        if batch == 1 or batch > 3000:
            raise PlanError(f"{batch} is refused")
        return 100 + 10 * batch

    assert largest_batch(need, 119).batch == 0
    assert largest_batch(need, 120).batch == 2
    assert largest_batch(need, 150).batch == 5
    with pytest.raises(PlanError, match="is refused"):
        largest_batch(need, 10**6)


def _sized(batch: int) -> Any:
    """A weight, an activation by the sample, and one that outlives it."""
    asked = np.array([5 * MIB + 7, batch * 300_000, batch * 1_000_000 + 12], np.int64)
    taken, large = on_device(asked)
    tensors = [
        Tensor(1, {0: False, 3: True}, Kind.PERSISTENT, "param"),
        Tensor(1, {0: True, 1: False}),
        Tensor(1, {1: True, 2: False}),
    ]
    step = make_step([1.0] * 4, tensors)
    return SimpleNamespace(step=replace(step, bytes=taken, large=large), asked=asked)


def test_a_line_for_each_tensor_knows_any_step() -> None:
    lines = tensor_lines(_sized, (8, 16), lambda step: step.peak_bytes + 1000)
    assert lines is not None
    for batch in (1, 2, 3, 7, 23, 1000):
        found, truth = lines.step(batch), _sized(batch).step
        assert found.bytes.tolist() == truth.bytes.tolist()
        assert found.large.tolist() == truth.large.tolist()
        assert lines.at(batch) == truth.peak_bytes + 1000
    for budget in (10 * MIB, 100 * MIB, 5000 * MIB):
        most = lines.largest(budget)
        assert lines.at(most) <= budget < lines.at(most + 1)
    assert lines.largest(MIB) == 0


def test_a_step_without_a_batch_is_an_error() -> None:
    same = _sized(8)
    with pytest.raises(PlanError, match="no tensor of the step grows with the batch"):
        TensorLines({8: same, 16: same}, lambda step: 0).largest(MIB)


def test_lines_need_steps_of_one_form() -> None:
    steps = {8: _sized(8), 16: _sized(16)}
    assert tensor_lines(steps.__getitem__, (8, 16), lambda step: 0) is not None
    steps[16].step = replace(steps[16].step, op_names=("a", "b", "c", "d"))
    assert not alike(steps[8].step, steps[16].step)
    assert tensor_lines(steps.__getitem__, (8, 16), lambda step: 0) is None


def test_a_model_is_asked_instead_of_the_line() -> None:
    asked: list[tuple[int, int]] = []

    def model(first: int, second: int) -> Line:
        asked.append((first, second))
        return Line(0, 100)

    found = largest_batch(lambda batch: 1_000 + 10 * batch, 2_000, batches=(4, 2), model=model)
    assert asked == [(2, 4)]
    assert found.modelled
    assert found.sample == 100
    assert found.predicted == 20
    assert found.batch == 100


@given(st.lists(st.integers(0, 10**9), min_size=1))
def test_on_device_is_device_bytes_of_many(sizes: list[int]) -> None:
    taken, large = on_device(np.array(sizes, np.int64))
    assert taken.tolist() == [device_bytes(size) for size in sizes]
    assert large.tolist() == [size >= 2 * MIB for size in sizes]
