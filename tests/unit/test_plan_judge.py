"""The judge of plans: what the steps of a plan follow after some of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umem.base.native import core
from umem.session.meter import MORE, SLOWER, Cost
from umem.session.plan_judge import (
    AGAIN,
    FIRST_TRIAL,
    RECENT,
    SKIPPED,
    TRIAL,
    TURN,
    Choice,
    PlanJudge,
    Verdict,
)

ALL = (Choice.FIRST, Choice.SECOND, Choice.NONE)
MIB = 1 << 20


def taking_turns(choices: Sequence[Choice] = ALL, *, hides_transfers: bool = False) -> PlanJudge:
    made = PlanJudge(choices, hides_transfers=hides_transfers)
    for i in range(RECENT):
        started = made.step_ended(i % 2 + 1, None, ops=10, recording=False)
    assert started is not None
    assert started.choice is choices[0]
    return made


def tried(made: PlanJudge, costs: dict[Choice, Cost], kinds: Sequence[int] = (1, 2)) -> Choice:
    """Let each choice cost this much a step; return the one that is kept."""
    order = []
    while made.takes_turns:
        order.append(made.choice)
        made.step_ended(kinds[len(order) % len(kinds)], costs[made.choice], ops=10, recording=False)
    assert len(order) == TURN * len(costs)
    assert order == sorted(order, key=list(costs).index)
    return made.choice


def test_steps_that_are_all_alike_begin_none() -> None:
    made = PlanJudge(ALL, hides_transfers=False)
    assert all(made.step_ended(1, None, ops=10, recording=False) is None for _ in range(5 * RECENT))


def test_it_waits_until_nothing_is_recorded() -> None:
    made = PlanJudge(ALL, hides_transfers=False)
    assert all(
        made.step_ended(i % 2, None, ops=10, recording=True) is None for i in range(5 * RECENT)
    )
    assert all(
        made.step_ended(i % 2, None, ops=10, recording=False) is None for i in range(RECENT - 1)
    )
    assert made.step_ended(1, None, ops=10, recording=False) == Verdict(Choice.FIRST, None, "")


def test_steps_that_go_by_no_plan_vary() -> None:
    made = PlanJudge(ALL, hides_transfers=False)
    verdicts = [made.step_ended(0, None, ops=10, recording=False) for _ in range(RECENT)]
    assert verdicts[-1] == Verdict(Choice.FIRST, None, "")


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
    assert tried(taking_turns(), {c: Cost(mib * MIB, 1.0) for c, mib in figures.items()}) is kept


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
    assert tried(taking_turns(hides_transfers=True), costs) is kept


def test_policies_without_a_spare_plan_compare_two() -> None:
    choices = (Choice.FIRST, Choice.NONE)
    costs = {Choice.FIRST: Cost(200, 2.0), Choice.NONE: Cost(100, 1.0)}
    assert tried(taking_turns(choices), costs) is Choice.NONE


def test_steps_are_compared_with_those_of_their_kind() -> None:
    """An evaluation falls into the time of one choice, and moves little whatever is chosen."""
    made = taking_turns()
    for choice in ALL:
        for i in range(TURN):
            evaluates = choice is Choice.NONE and i > SKIPPED + 2
            moved = 10 if evaluates else {Choice.FIRST: 100, Choice.SECOND: 90}.get(choice, 200)
            made.step_ended(9 if evaluates else 1, Cost(moved * MIB, 1.0), ops=10, recording=False)
    assert made.over
    assert made.choice is Choice.SECOND


def test_choices_that_had_no_steps_alike_are_tried_again() -> None:
    made = taking_turns()
    number = 0
    while made.takes_turns:
        number += 1
        made.step_ended(number, Cost(MIB, 1.0), ops=10, recording=False)
    assert not made.over
    assert made.choice is Choice.FIRST
    for i in range(RECENT):
        made.step_ended(i % 2, None, ops=10, recording=False)
    assert made.takes_turns


def test_kinds_that_come_in_a_long_cycle_are_compared_over_several_turns() -> None:
    """A ring buffer's, of which a turn sees three of eight, and the three turns none in common."""
    made, costs = taking_turns(), {Choice.FIRST: 120, Choice.SECOND: 90, Choice.NONE: 200}
    for i in range(10 * 32):
        if made.over:
            break
        made.step_ended(
            i // 4 % 8 + 1, Cost(costs[made.choice] * MIB, 1.0), ops=10, recording=False
        )
    assert made.over
    assert i < 5 * 32
    assert made.choice is Choice.SECOND


def test_kinds_that_never_come_again_do_not_pile_up() -> None:
    made = taking_turns()
    for i in range(50 * TURN):
        made.step_ended(i, Cost(MIB, 1.0), ops=10, recording=False)
    assert not made.over
    assert all(len(kinds) <= core.MAX_PLANS + TURN for kinds in made._sums.values())


def test_what_the_last_choice_left_behind_does_not_count() -> None:
    made = taking_turns()
    for choice in ALL:
        for i in range(TURN):
            moved = 1000 if i < SKIPPED and choice is Choice.SECOND else 100
            moved += 50 if choice is Choice.FIRST else 0
            made.step_ended(1, Cost(moved * MIB, 1.0), ops=10, recording=False)
    assert made.choice is Choice.SECOND


def test_choices_take_turns_once() -> None:
    made = taking_turns()
    tried(made, {c: Cost(100, 1.0) for c in ALL})
    assert all(made.step_ended(i, None, ops=10, recording=False) is None for i in range(5 * RECENT))


def test_longer_steps_may_cost_more() -> None:
    """By chance one choice has steps of twice the ops."""
    made = taking_turns()
    for choice in ALL:
        for _ in range(TURN):
            ops = 20 if choice is Choice.SECOND else 10
            per_op = {Choice.FIRST: 10, Choice.SECOND: 8}.get(choice, 12)
            made.step_ended(0, Cost(per_op * ops * MIB, 1.0), ops=ops, recording=False)
    assert made.choice is Choice.SECOND


WITHOUT = Cost(1000 * MIB, 1000.0)
WORSE = Cost(2000 * MIB, 2000.0)
LESS = Cost(500 * MIB, 500.0)


def judge(
    choices: Sequence[Choice] = (Choice.FIRST, Choice.NONE), *, both: bool = False
) -> PlanJudge:
    return PlanJudge(choices, hides_transfers=not both)


def after(made: PlanJudge, step: Cost, plan: int = 1) -> Verdict | None:
    """Take a step while steps are recorded, so that no choices take turns."""
    return made.step_ended(plan, step, ops=10, recording=True)


def dropped(*steps: Cost, without: Cost = WITHOUT) -> list[bool]:
    made = judge()
    made.begin(1, without)
    verdicts = [after(made, step) for step in steps]
    return [verdict is not None and bool(verdict.why) for verdict in verdicts]


def test_a_trial_takes_two_steps_and_ends_once() -> None:
    assert dropped(*[WORSE] * 5) == [False, True, False, False, False]


def test_the_reason_has_the_figures() -> None:
    made = judge()
    made.begin(1, WITHOUT)
    assert after(made, WORSE) is None
    assert after(made, Cost(3000 * MIB, 4000.0)) == Verdict(
        Choice.NONE, 1, "its steps moved 2500 MiB in 3.0 ms, and without it 1000 MiB in 1.0 ms"
    )


@pytest.mark.parametrize(
    "step",
    [
        Cost(900 * MIB, 2000.0),  # slower, and yet it moves less
        Cost(2000 * MIB, 900.0),  # more, and all of it hidden
        Cost(2000 * MIB, 1050.0),  # not clearly slower
        Cost(1001 * MIB, 2000.0),
        WITHOUT,
        Cost(0, 0.0),
    ],
)
def test_one_step_that_is_no_worse_clears_the_plan(step: Cost) -> None:
    assert not any(dropped(WORSE, step, WORSE, WORSE))
    assert not any(dropped(step, WORSE, WORSE, WORSE))


def test_each_plan_has_its_own_steps() -> None:
    made = judge()
    made.begin(1, WITHOUT)
    made.begin(2, WITHOUT)
    made.begin(3, None)  # there is no fair comparison
    for plan in (1, 2, 3):
        assert after(made, WORSE, plan) is None
    assert after(made, WORSE, 2) is not None
    assert after(made, WORSE, 1) is not None
    assert after(made, WORSE, 3) is None


def test_a_step_after_one_of_another_kind_is_no_part_of_a_trial() -> None:
    made = judge()
    made.begin(1, WITHOUT)
    assert after(made, WORSE) is None
    assert made.step_ended(1, WORSE, ops=10, recording=True, alike=False) is None
    assert made.busy
    assert after(made, WORSE) is not None
    assert not made.busy


def test_where_choices_take_turns_no_plan_is_on_trial() -> None:
    made = judge()
    made.begin(1, WITHOUT)
    for i in range(RECENT):
        made.step_ended(i % 2 + 1, None, ops=10, recording=False)
    assert made.takes_turns
    assert made.begin(2, WITHOUT) is Choice.FIRST
    for plan in (1, 2):
        assert [made.step_ended(plan, WORSE, ops=10, recording=True) for _ in "123"] == [None] * 3


def test_plans_that_no_step_follows_do_not_pile_up() -> None:
    made = judge()
    for plan in range(1, 1001):
        made.begin(plan, WITHOUT)
    assert [after(made, WORSE, 1) for _ in "123"] == [None] * 3
    assert after(made, WORSE, 1000) is None
    assert after(made, WORSE, 1000) is not None


costs = st.builds(Cost, st.integers(0, 1 << 40), st.floats(0, 1e9))


@given(costs, st.lists(costs, min_size=TRIAL, max_size=TRIAL))
def test_dropped_exactly_when_all_are_worse_in_both(without: Cost, steps: list[Cost]) -> None:
    worse = [s.bytes > MORE * without.bytes and s.us > SLOWER * without.us for s in steps]
    assert dropped(*steps, without=without)[-1] == all(worse)


def chosen(steps: Sequence[Cost], *, both: bool) -> str:
    """Return the result of each step: F, S or N for a choice, "-" for nothing."""
    made = judge(ALL, both=both)
    made.begin(1, WITHOUT)
    verdicts = [after(made, step) for step in steps]
    return "".join("-" if verdict is None else verdict.choice.name[0] for verdict in verdicts)


def test_a_plan_that_failed_is_followed_by_the_spare_one() -> None:
    assert chosen([WORSE] * 2 + [LESS] * 4, both=False) == "-S----"
    assert chosen([WORSE] * 6, both=False) == "-S-N--"
    assert chosen([LESS] * 6, both=False) == "------"


HIDDEN = Cost(2000 * MIB, 900.0)  # more than without a plan, in less time


@pytest.mark.parametrize(
    ("without", "result"),
    [
        (Cost(1000 * MIB, 800.0), "-N-S--"),  # the step before the plan was slow: a first one
        (Cost(1000 * MIB, 850.0), "-N-F--"),  # within 10 %
        (Cost(1990 * MIB, 100.0), "-N-F--"),  # the plan moves hardly more
        (WITHOUT, "-N-F--"),
    ],
)
def test_a_plan_that_moves_more_is_compared_again(without: Cost, result: str) -> None:
    # The first step without it still carries what the plan left behind.
    steps = [HIDDEN, HIDDEN, WORSE, without, LESS, LESS]
    assert chosen(steps, both=False) == result


def test_a_spare_plan_is_compared_with_the_steps_that_were_measured_again() -> None:
    quick, spare = Cost(1000 * MIB, 500.0), Cost(1100 * MIB, 600.0)
    steps = [HIDDEN, HIDDEN, quick, quick, spare, spare]
    assert chosen(steps, both=False) == "-N-S-N"
    made = judge()
    made.begin(1, WITHOUT)
    verdicts = [after(made, step) for step in steps[:4]]
    assert verdicts[1] == Verdict(Choice.NONE, 1, "")
    assert verdicts[3] is not None
    assert verdicts[3].why  # without a spare plan it is dropped
    assert verdicts[3].choice is Choice.NONE
    assert not made.busy


def test_a_plan_stays_on_trial_while_steps_without_it_are_measured() -> None:
    made = judge()
    made.begin(1, WITHOUT)
    for step in (HIDDEN, HIDDEN, WITHOUT):
        after(made, step)
        assert made.busy
    assert after(made, WITHOUT) == Verdict(Choice.FIRST, 1, "")
    assert not made.busy


def test_of_two_plans_that_are_both_tried_the_one_stays_that_moves_less() -> None:
    between = Cost(700 * MIB, 700.0)
    assert chosen([*[between] * 3, LESS, LESS, LESS], both=True) == "--S---"
    assert chosen([*[LESS] * 3, between, between], both=True) == "--S-F"
    # The last step of each counts; lru moves less than both.
    assert chosen([between, LESS, WORSE, LESS, WORSE, LESS], both=True) == "--S-N-"


def test_of_nearly_equal_plans_the_first_stays() -> None:
    near = Cost(int(LESS.bytes * 1.019), 900.0)
    assert chosen([near] * 3 + [LESS] * 2, both=True) == "--S-F"


def test_a_plan_that_moves_nothing_needs_no_other() -> None:
    assert chosen([LESS, LESS, Cost(0, 0.0), LESS, LESS], both=True) == "-----"


@pytest.mark.parametrize(
    ("spare", "kept"), [(900, None), (1000, Choice.FIRST), (1100, Choice.FIRST)]
)
def test_without_a_step_to_compare_with_the_two_plans_are_compared(
    spare: int, kept: Choice | None
) -> None:
    made = judge(ALL, both=True)
    made.begin(1, None)
    verdicts = [after(made, Cost(1000 * MIB, 1.0)) for _ in range(3)]
    assert verdicts[:2] == [None, None]
    assert verdicts[2] == Verdict(Choice.SECOND, 1, "its steps moved 1000 MiB in 0.0 ms")
    assert after(made, Cost(spare * MIB, 1.0)) is None
    last = after(made, Cost(spare * MIB, 1.0))
    assert (last and last.choice) is kept
    assert not made.busy


class Steps:
    """Steps that are alike, whose cost depends on what they follow."""

    def __init__(self, made: PlanJudge, costs: dict[Choice, Cost], present: Choice) -> None:
        self.made, self.costs, self.present = made, costs, present
        self.chosen: list[tuple[int, Choice]] = []  # by the number of the step
        self.recorded = self.steps = 0

    def run(self, count: int, plan: int = 1) -> None:
        for _ in range(count):
            recorded = self.made.tries_again(plan)
            self.recorded += recorded
            self.steps += 1
            cost = self.costs[self.present] if recorded else None
            verdict = self.made.step_ended(plan, cost, ops=10, recording=recorded)
            if verdict is not None and verdict.plan in (1, None):
                self.present = verdict.choice
                self.chosen.append((self.steps, verdict.choice))


def after_a_phase(kept: Choice, costs: dict[Choice, Cost], *, both: bool) -> Steps:
    """Return calm steps after steps that varied, during which `kept` was the cheapest."""
    made = taking_turns(hides_transfers=not both)
    in_phase = {choice: Cost(9 * MIB if choice is kept else 10 * MIB, 2.0) for choice in ALL}
    in_phase[kept] = in_phase[kept]._replace(us=1.0)
    assert tried(made, in_phase) is kept
    made.step_ended(0, None, ops=10, recording=False)
    return Steps(made, costs, kept)


CALM = {Choice.FIRST: LESS, Choice.SECOND: WITHOUT, Choice.NONE: WORSE}


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("kept", [Choice.SECOND, Choice.NONE])
def test_a_phase_does_not_fix_the_choice_for_good(kept: Choice, both: bool) -> None:
    steps = after_a_phase(kept, CALM, both=both)
    steps.run(AGAIN)
    assert steps.chosen == []
    steps.run(AGAIN - 1)
    assert steps.present is Choice.FIRST
    steps.chosen.clear()
    steps.run(100 * AGAIN)
    assert steps.chosen == []


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("kept", [Choice.SECOND, Choice.NONE])
def test_a_choice_that_is_confirmed_is_tried_half_as_often(kept: Choice, both: bool) -> None:
    costs = dict.fromkeys(ALL, WORSE) | {kept: LESS}
    steps = after_a_phase(kept, costs, both=both)
    steps.run(16 * AGAIN + 8)
    assert steps.present is kept
    begun = [at for at, choice in steps.chosen if choice is Choice.FIRST]
    assert begun == [wait * AGAIN + TRIAL for wait in (1, 2, 4, 8, 16)]
    assert steps.recorded <= 5 * (TRIAL + FIRST_TRIAL)


def test_a_plan_that_its_own_trial_dropped_is_tried_again() -> None:
    made = judge(ALL)
    made.begin(1, WITHOUT)
    for _ in range(2 * TRIAL):
        last = after(made, WORSE)
    assert last is not None
    assert last.choice is Choice.NONE
    steps = Steps(made, CALM, Choice.NONE)
    steps.run(2 * AGAIN)
    assert steps.present is Choice.FIRST


def test_a_plan_that_stays_is_not_tried_again() -> None:
    made = judge(ALL, both=True)
    made.begin(1, WITHOUT)
    for _ in range(FIRST_TRIAL + TRIAL):
        after(made, LESS)
    steps = Steps(made, CALM, Choice.FIRST)
    steps.run(100 * AGAIN)
    assert steps.recorded == 0
    assert steps.chosen == []


def test_steps_that_are_not_in_a_row_begin_no_trial() -> None:
    steps = after_a_phase(Choice.NONE, CALM, both=True)
    for _ in range(20):
        steps.run(AGAIN - 1)
        steps.run(1, plan=2)
    assert steps.recorded == 0
    assert steps.chosen == []


@pytest.mark.parametrize("tried_steps", range(1, TRIAL + FIRST_TRIAL))
def test_a_second_trial_ends_with_the_row(tried_steps: int) -> None:
    """The plan may never be followed again, or by turns with others: steps must not be recorded."""
    steps = after_a_phase(Choice.NONE, CALM, both=True)
    steps.run(AGAIN + tried_steps)
    assert steps.made.tries_again(1)
    steps.run(1, plan=2)
    assert steps.chosen[-1] == (steps.steps, Choice.NONE)
    assert not steps.made.tries_again(1)
    assert not steps.made.compares(1)
    steps.recorded = 0
    steps.run(2 * AGAIN - 1)
    assert steps.recorded == 0
    steps.run(2 * AGAIN)
    assert steps.present is Choice.FIRST


def test_a_second_trial_whose_steps_have_no_cost_ends() -> None:
    """Such as where more events came than are kept."""
    steps = after_a_phase(Choice.NONE, CALM, both=True)
    steps.run(AGAIN)
    assert steps.made.tries_again(1)
    for _ in range(2 * AGAIN):
        steps.made.step_ended(1, None, ops=10, recording=True)
    assert not steps.made.tries_again(1)
