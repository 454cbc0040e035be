"""The contest of choices: when it runs, and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from umem.session.contest import RECENT, SKIPPED, STEPS, Choice, Contest
from umem.session.plan_guard import Cost

ALL = (Choice.FIRST, Choice.SECOND, Choice.NONE)
MIB = 1 << 20


def contest(choices: Sequence[Choice] = ALL, *, hides_transfers: bool = False) -> Contest:
    made = Contest(choices, hides_transfers=hides_transfers)
    for i in range(RECENT):
        started = made.step_ended(i % 2 + 1, None, ops=10, recording=False)
    assert started is choices[0]
    return made


def tried(made: Contest, costs: dict[Choice, Cost], kinds: Sequence[int] = (1, 2)) -> Choice:
    """Make each choice cost this much per step; return the one that is kept."""
    order = []
    while made.running:
        order.append(made.choice)
        made.step_ended(kinds[len(order) % len(kinds)], costs[made.choice], ops=10, recording=False)
    assert len(order) == STEPS * len(costs)
    assert order == sorted(order, key=list(costs).index)
    return made.choice


def test_steps_that_are_all_alike_begin_none() -> None:
    made = Contest(ALL, hides_transfers=False)
    assert all(made.step_ended(1, None, ops=10, recording=False) is None for _ in range(5 * RECENT))


def test_it_waits_until_nothing_is_recorded() -> None:
    made = Contest(ALL, hides_transfers=False)
    assert all(
        made.step_ended(i % 2, None, ops=10, recording=True) is None for i in range(5 * RECENT)
    )
    assert all(
        made.step_ended(i % 2, None, ops=10, recording=False) is None for i in range(RECENT - 1)
    )
    assert made.step_ended(1, None, ops=10, recording=False) is Choice.FIRST


def test_steps_that_go_by_no_plan_vary() -> None:
    made = Contest(ALL, hides_transfers=False)
    assert [made.step_ended(0, None, ops=10, recording=False) for _ in range(RECENT)][
        -1
    ] is Choice.FIRST


@pytest.mark.parametrize(
    ("first", "second", "none", "kept"),
    [
        (100, 100, 100, Choice.FIRST),
        (101, 100, 100, Choice.FIRST),  # within 2 %
        (110, 100, 100, Choice.SECOND),
        (110, 110, 100, Choice.NONE),
        (110, 101, 100, Choice.SECOND),
    ],
)
def test_where_bytes_take_the_time_of_compute_the_fewest_win(
    first: int, second: int, none: int, kept: Choice
) -> None:
    figures = dict(zip(ALL, (first, second, none), strict=True))
    assert tried(contest(), {c: Cost(mib * MIB, 1.0) for c, mib in figures.items()}) is kept


@pytest.mark.parametrize(
    ("first", "none", "kept"),
    [
        (Cost(200 * MIB, 90.0), Cost(100 * MIB, 100.0), Choice.FIRST),  # more bytes, all hidden
        (Cost(200 * MIB, 120.0), Cost(100 * MIB, 100.0), Choice.SECOND),
        (Cost(100 * MIB, 120.0), Cost(100 * MIB, 100.0), Choice.FIRST),  # a noisy machine
    ],
)
def test_where_transfers_hide_a_choice_has_to_be_worse_in_both(
    first: Cost, none: Cost, kept: Choice
) -> None:
    costs = {Choice.FIRST: first, Choice.SECOND: none, Choice.NONE: none}
    assert tried(contest(hides_transfers=True), costs) is kept


def test_policies_without_a_spare_plan_compare_two() -> None:
    choices = (Choice.FIRST, Choice.NONE)
    costs = {Choice.FIRST: Cost(200, 2.0), Choice.NONE: Cost(100, 1.0)}
    assert tried(contest(choices), costs) is Choice.NONE


def test_steps_are_compared_with_those_of_their_kind() -> None:
    """An evaluation occurs during one choice, and moves little under any."""
    made = contest()
    for choice in ALL:
        for i in range(STEPS):
            evaluates = choice is Choice.NONE and i > SKIPPED + 2
            moved = 10 if evaluates else {Choice.FIRST: 100, Choice.SECOND: 90}.get(choice, 200)
            made.step_ended(9 if evaluates else 1, Cost(moved * MIB, 1.0), ops=10, recording=False)
    assert made.over
    assert made.choice is Choice.SECOND


def test_choices_that_had_no_steps_alike_are_tried_again() -> None:
    made = contest()
    number = 0
    while made.running:
        number += 1
        made.step_ended(number, Cost(MIB, 1.0), ops=10, recording=False)
    assert not made.over
    assert made.choice is Choice.FIRST
    for i in range(RECENT):
        made.step_ended(i % 2, None, ops=10, recording=False)
    assert made.running


def test_what_the_last_choice_left_behind_does_not_count() -> None:
    made = contest()
    for choice in ALL:
        for i in range(STEPS):
            moved = 1000 if i < SKIPPED and choice is Choice.SECOND else 100
            moved += 50 if choice is Choice.FIRST else 0
            made.step_ended(1, Cost(moved * MIB, 1.0), ops=10, recording=False)
    assert made.choice is Choice.SECOND


def test_it_is_decided_once() -> None:
    made = contest()
    tried(made, {c: Cost(100, 1.0) for c in ALL})
    assert all(made.step_ended(i, None, ops=10, recording=False) is None for i in range(5 * RECENT))


def test_longer_steps_may_cost_more() -> None:
    """By chance one choice has steps of twice the ops."""
    made = contest()
    for choice in ALL:
        for _ in range(STEPS):
            ops = 20 if choice is Choice.SECOND else 10
            per_op = {Choice.FIRST: 10, Choice.SECOND: 8}.get(choice, 12)
            made.step_ended(0, Cost(per_op * ops * MIB, 1.0), ops=ops, recording=False)
    assert made.choice is Choice.SECOND
