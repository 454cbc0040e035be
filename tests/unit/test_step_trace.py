"""The columns of a step, against their definitions worked op by op."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.synthetic import random_trace, training

from umem.trace.step_builder import StepBuilder
from umem.trace.step_trace import Gaps, Kind, StepTrace

PAGE = 2 << 20


def step_of(seed: int) -> StepTrace:
    builder = StepBuilder()
    for event in random_trace(seed, ops=seed % 17 + 3):
        builder.add(event)
    return builder.step()


def accesses(step: StepTrace) -> list[dict[int, bool]]:
    """By op the tensors, and whether it writes them."""
    return [
        dict(zip(step.access_tensor[a:b].tolist(), step.access_write[a:b].tolist(), strict=True))
        for a, b in itertools.pairwise(step.access_start)
    ]


@given(st.integers(0, 10_000))
def test_columns_are_what_they_say(seed: int) -> None:
    step = step_of(seed)
    by_op = accesses(step)
    ops, tensors = range(step.n_ops), range(step.n_tensors)
    assert len(by_op) == step.n_ops == len(step.op_names)
    assert sum(map(len, by_op)) == len(step.access_tensor)  # a tensor once an op

    size = step.bytes.tolist()
    assert step.working_set.tolist() == [sum(size[t] for t in by_op[i]) for i in ops]
    alive = [[t for t in tensors if step.first[t] <= i <= step.last[t]] for i in ops]
    live = [sum(size[t] for t in alive[i]) for i in ops]
    assert step.live_bytes.tolist() == live
    assert step.peak_bytes == max(live)
    small = max(sum(size[t] for t in alive[i] if not step.large[t]) for i in ops)
    assert step.small_bytes == -(-small // PAGE) * PAGE
    assert all(set(by_op[i]) <= set(alive[i]) for i in ops)

    uses = [[i for i in ops if t in by_op[i]] for t in tensors]
    assert [step.uses(t).tolist() for t in tensors] == uses
    assert step.access_op[step.use_order].tolist() == [i for of in uses for i in of]
    written = {t for of_op in by_op for t, write in of_op.items() if write}
    clean = [step.kind[t] == Kind.PERSISTENT and t not in written for t in tensors]
    assert step.clean.tolist() == clean
    assert step.compute_us == pytest.approx(sum(step.op_us))


@given(st.integers(0, 10_000))
def test_gaps_are_the_idle_intervals(seed: int) -> None:
    step = step_of(seed)
    n, us = step.n_ops, step.op_us.tolist()
    expected: set[tuple[int, int, int]] = set()
    for tensor in range(step.n_tensors):
        uses = step.uses(tensor).tolist()
        if uses and step.kind[tensor] == Kind.PERSISTENT:
            uses.append(uses[0] + n)
        expected |= {(tensor, a, b) for a, b in itertools.pairwise(uses) if b > a + 1}
    gaps = step.gaps
    found = zip(gaps.tensor.tolist(), gaps.start.tolist(), gaps.end.tolist(), strict=True)
    assert sorted(found) == sorted(expected)
    idle = [
        sum(us[i % n] for i in range(a + 1, b)) for a, b in zip(gaps.start, gaps.end, strict=True)
    ]
    assert np.allclose(gaps.idle_us, idle)


def test_a_step_worked_by_hand() -> None:
    builder = StepBuilder()
    for event in training(2, 3 << 20, PAGE, us=10.0):
        builder.add(event)
    step = builder.step()
    # Tensors: both weights, both activations. Ops: forward 0 and 1, backward 1 and 0.
    assert step.bytes.tolist() == [2 * PAGE, 2 * PAGE, PAGE, PAGE]
    assert [sorted(of_op) for of_op in accesses(step)] == [[0, 2], [1, 2, 3], [1, 2, 3], [0, 2]]
    assert step.working_set.tolist() == [3 * PAGE, 4 * PAGE, 4 * PAGE, 3 * PAGE]
    assert step.live_bytes.tolist() == [5 * PAGE, 6 * PAGE, 6 * PAGE, 5 * PAGE]
    gaps = step.gaps
    found = zip(gaps.tensor.tolist(), gaps.start.tolist(), gaps.end.tolist(), strict=True)
    # Weight 0 is idle in the middle, weight 1 from its backward to the next step's forward.
    assert dict(zip(found, gaps.idle_us.tolist(), strict=True)) == {
        (0, 0, 3): 30.0,
        (1, 2, 5): 30.0,
    }
    assert step.clean.tolist() == [True, True, False, False]
    assert step.small_bytes == 0


def arrays(value: object, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays in a value, with the path to each."""
    if isinstance(value, np.ndarray):
        yield name, value
    elif isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from arrays(part, f"{name}[{i}]")
    elif isinstance(value, Gaps):
        for field, part in vars(value).items():
            yield from arrays(part, f"{name}.{field}")


def test_no_policy_changes_the_step_of_the_others() -> None:
    step = step_of(7)
    names = [name for name in dir(step) if not name.startswith("_")]
    found = dict(pair for name in names for pair in arrays(getattr(step, name), name))
    assert {"op_us", "bytes", "begin_us", "begin_twice_us", "gaps.idle_us"} <= found.keys()
    computed_anew = {"is_segment"}
    assert {n for n, array in found.items() if array.flags.writeable} <= computed_anew
    for made in (step.pieces, step.in_exact_parts, step.in_parts):
        assert not made.bytes.flags.writeable
