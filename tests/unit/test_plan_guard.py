"""The plan guard: when it gives a plan up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umem.policies.base import Plan
from umem.session.plan_guard import MORE, SLOWER, STEPS, Cost, PlanGuard, Verdict

WITHOUT = Cost(1000 << 20, 1000.0)
WORSE = Cost(2000 << 20, 2000.0)


def verdicts(*steps: Cost, without: Cost = WITHOUT) -> list[bool]:
    trials = PlanGuard()
    trials.begin(1, without)
    return [trials.judge(1, step) is not None for step in steps]


def test_it_takes_two_steps_and_is_said_once() -> None:
    assert verdicts(*[WORSE] * 5) == [False, True, False, False, False]


def test_the_reason_has_the_figures() -> None:
    trials = PlanGuard()
    trials.begin(1, WITHOUT)
    assert trials.judge(1, WORSE) is None
    assert trials.judge(1, Cost(3000 << 20, 4000.0)) == Verdict(
        None, "its steps moved 2500 MiB in 3.0 ms, and without it 1000 MiB in 1.0 ms"
    )


@pytest.mark.parametrize(
    "step",
    [
        Cost(900 << 20, 2000.0),  # slower, although it moves less
        Cost(2000 << 20, 900.0),  # more, and all of it hidden
        Cost(2000 << 20, 1050.0),  # not clearly slower
        Cost(1001 << 20, 2000.0),
        WITHOUT,
        Cost(0, 0.0),
    ],
)
def test_one_step_that_is_no_worse_clears_the_plan(step: Cost) -> None:
    assert not any(verdicts(WORSE, step, WORSE, WORSE))
    assert not any(verdicts(step, WORSE, WORSE, WORSE))


def test_each_plan_has_its_own_steps() -> None:
    trials = PlanGuard()
    trials.begin(1, WITHOUT)
    trials.begin(2, WITHOUT)
    for plan in (1, 2):
        assert trials.judge(plan, WORSE) is None
    assert trials.judge(2, WORSE)
    assert trials.judge(1, WORSE)
    assert trials.judge(3, WORSE) is None  # for a step without a fair comparison


def test_no_verdict_after_clear() -> None:
    trials = PlanGuard()
    trials.begin(1, WITHOUT)
    trials.clear()
    assert [trials.judge(1, WORSE) for _ in range(3)] == [None] * 3


def test_plans_that_no_step_goes_by_do_not_pile_up() -> None:
    trials = PlanGuard()
    for plan in range(1, 1001):
        trials.begin(plan, WITHOUT)
    assert trials.judge(1, WORSE) is None
    assert trials.judge(1, WORSE) is None
    assert trials.judge(1000, WORSE) is None
    assert trials.judge(1000, WORSE)


costs = st.builds(Cost, st.integers(0, 1 << 40), st.floats(0, 1e9))


@given(costs, st.lists(costs, min_size=STEPS, max_size=STEPS))
def test_given_up_exactly_when_all_are_worse_in_both(without: Cost, steps: list[Cost]) -> None:
    worse = [s.bytes > MORE * without.bytes and s.us > SLOWER * without.us for s in steps]
    assert verdicts(*steps, without=without)[-1] == all(worse)


FIRST, SPARE = cast("Plan", "first"), cast("Plan", "spare")
LESS = Cost(500 << 20, 500.0)


def chosen(steps: Sequence[Cost], *, both: bool) -> list[Plan | str | None]:
    """The result of each step: a plan, None for lru, or "-" for nothing."""
    trials = PlanGuard()
    trials.begin(1, WITHOUT, FIRST, lambda: SPARE, both=both)
    verdicts = [trials.judge(1, step) for step in steps]
    return ["-" if verdict is None else verdict.plan for verdict in verdicts]


def test_a_plan_that_failed_is_followed_by_the_spare_one() -> None:
    assert chosen([WORSE] * 2 + [LESS] * 4, both=False) == ["-", SPARE, "-", "-", "-", "-"]
    assert chosen([WORSE] * 6, both=False) == ["-", SPARE, "-", None, "-", "-"]
    assert chosen([LESS] * 6, both=False) == ["-"] * 6


def test_of_two_plans_that_are_both_tested_the_one_stays_that_moves_less() -> None:
    between = Cost(700 << 20, 700.0)
    two = [between, LESS]
    assert chosen([*[between] * 3, LESS, LESS, LESS], both=True) == ["-", "-", SPARE, *"---"]
    assert chosen([*[LESS] * 3, between, between], both=True) == ["-", "-", SPARE, "-", FIRST]
    # The last step of each counts; lru moves less than both.
    assert chosen([*two, WORSE, LESS, WORSE, LESS], both=True) == ["-", "-", SPARE, "-", None, "-"]


def test_of_nearly_equal_plans_the_first_stays() -> None:
    near = Cost(int(LESS.bytes * 1.019), 900.0)
    assert chosen([near] * 3 + [LESS] * 2, both=True) == ["-", "-", SPARE, "-", FIRST]


def test_a_plan_that_moves_nothing_needs_no_other() -> None:
    assert chosen([LESS, LESS, Cost(0, 0.0), LESS, LESS], both=True) == ["-"] * 5


@pytest.mark.parametrize(("spare", "kept"), [(900, "spare"), (1000, "first"), (1100, "first")])
def test_without_a_step_to_compare_with_the_two_plans_are_compared(spare: int, kept: str) -> None:
    trials = PlanGuard()
    trials.begin(1, None, FIRST, lambda: SPARE, both=True)
    verdicts = [trials.judge(1, Cost(1000 << 20, 1.0)) for _ in range(3)]
    assert verdicts[:2] == [None, None]
    assert verdicts[2] == Verdict(SPARE, "its steps moved 1000 MiB in 0.0 ms")
    assert trials.judge(1, Cost(spare << 20, 1.0)) is None
    last = trials.judge(1, Cost(spare << 20, 1.0))
    assert (last.plan if last else SPARE) is (SPARE if kept == "spare" else FIRST)
    assert not trials.busy
