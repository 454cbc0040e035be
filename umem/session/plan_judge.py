"""The judge of plans: it compares steps that follow a plan, its spare plan, or neither."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from ..base.native import core
from .meter import MORE, Cost

TRIAL = 2  # steps of a plan's trial, all of which have to be worse
# Steps of the trial of the first of two plans, the last of which counts: earlier ones still carry
# what previous steps left behind, and make copies.
FIRST_TRIAL = 3
RECENT = 8  # steps that tell whether the program's steps vary
LONGEST = 16  # steps of a second trial
AGAIN = 64  # steps in a row after which a plan that failed is tried again; then 128, 256, ...
TURN = 12  # steps of each choice where they do
SKIPPED = 2  # first steps of a turn, which still carry what the previous choice left behind


class Choice(Enum):
    """A plan for some steps, or none: the steps follow it."""

    FIRST = "their plans"
    SECOND = "their spare plans"
    NONE = "lru"


class Verdict(NamedTuple):
    """A plan's steps follow another choice from now on."""

    choice: Choice
    plan: int | None  # its number; None: all plans
    why: str  # empty: nothing is decided yet


class _Sum(NamedTuple):
    """The costs of some steps of one kind, and the ops in them."""

    ops: int = 0
    steps: int = 0
    bytes: int = 0
    us: float = 0.0

    def plus(self, cost: Cost, ops: int) -> _Sum:
        return _Sum(self.ops + ops, self.steps + 1, self.bytes + cost.bytes, self.us + cost.us)


_Sums: TypeAlias = "defaultdict[int, _Sum]"  # by the plan that the steps followed


class _Trial:
    """The trial of one plan."""

    def __init__(self, without: Cost | None, instead: Choice | None = None, until: int = 0) -> None:
        self.without = without
        self.instead = instead  # of the plan, before it is tried again; None: a first trial
        self.until = until  # steps in a row, for a second trial whose steps have no cost
        self.steps: list[Cost] = []
        self.compared: list[Cost] = []  # the plan's steps, once steps without it are measured again
        self.steps_of_first: list[Cost] = []  # once the spare plan is tried


class PlanJudge:
    """Decides whether the steps of a plan follow it, its spare plan, or lru.

    Each new plan has a trial. It fails if all its first steps move clearly more and take clearly
    longer than a step without it. A plan that moves more and is no slower is compared again with
    steps that follow it: the step before it may have been slow for another reason, as the first
    ones of a program are. Its spare plan is tried next, and if that fails too, lru takes over. If
    the device moves bytes instead of computing, the spare plan is tried in any case,
    and the plan stays that moves the fewest bytes; of nearly equal ones the first.

    If steps of several kinds alternate, or no two are alike, the cost of a step depends on the
    steps around it, and a few of its own steps do not show how good a plan is. All plans then
    change together: each choice has a turn of some steps, and the cheapest is kept. That happens
    once, after recording has stopped. Steps are compared with steps of the same kind, which
    followed the same plan or none. Until each choice has had a step of one kind, the choices have
    further turns, whose steps are added.

    A plan whose steps follow another choice has a second trial once many of them came in a row,
    because a passing phase of the program may have decided against it. It is compared with that
    choice, which is restored if the plan is worse or a step of another kind ends the row. Later
    trials come after twice as many steps each.

    Args:
        choices: the possible ones, the preferred one first.
        hides_transfers: whether the device moves bytes while it computes. If so, a choice is
            dropped that moves more and takes longer than another one; else the fewest bytes count.
    """

    def __init__(self, choices: Sequence[Choice], *, hides_transfers: bool) -> None:
        self._choices = tuple(choices)
        self._hides_transfers = hides_transfers
        self._trials: dict[int, _Trial] = {}  # by plan
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._steps = 0  # of the present turn
        self._sums: dict[Choice, _Sums] = {}
        self._means: dict[Choice, Cost] = {}
        self._own: dict[int, Choice] = {}  # of plans with a verdict since `choice` changed
        self._waits: dict[int, int] = {}  # steps in a row until a plan is tried again
        self._last = self._row = 0  # the plan of the last step, and how many steps in a row had it
        self.choice = self._choices[0]  # of all plans
        self.takes_turns = self.over = False

    @property
    def busy(self) -> bool:
        """True if a plan on trial has had steps and awaits more."""
        trials = self._trials.values()
        return any(trial.steps or trial.compared or trial.steps_of_first for trial in trials)

    def compares(self, plan: int) -> bool:
        """Return whether the steps of a plan are being compared, so that it must not change."""
        return self.takes_turns or plan in self._trials

    def tries_again(self, plan: int) -> bool:
        """Return whether a plan has a second trial, for which its steps have to be recorded."""
        return plan in self._trials and self._trials[plan].instead is not None

    def begin(self, plan: int, without: Cost | None) -> Choice | None:
        """Start the trial of a new plan; return the choice of all plans if there is one instead.

        Args:
            plan: its number, as native code gave it.
            without: the cost of a step without any plan; None if unknown. Then plans are only
                compared with each other, if both are tried.
        """
        if self.takes_turns or self.over:
            return self.choice
        if without is not None or not self._hides_transfers:
            self._trials[plan] = _Trial(without)
            if len(self._trials) > core.MAX_PLANS:
                del self._trials[min(self._trials)]
        return None

    def step_ended(
        self, plan: int, cost: Cost | None, *, ops: int, recording: bool, alike: bool = True
    ) -> Verdict | None:
        """Take the cost of a step; return what changes.

        Args:
            plan: the number of the plan that the step followed, 0 without one.
            cost: of the step; None if it was not measured. Needed while choices take turns.
            ops: in the step, as far as plans know them.
            recording: whether steps are recorded, which takes time.
            alike: the previous step followed the same plan or none. Otherwise it left tensors of
                another kind of step behind, and this step is not part of a trial.
        """
        if self._turned(plan, cost, ops, recording=recording):
            self._trials.clear()
            self._own.clear()
            return Verdict(self.choice, None, self._why_all() if self.over else "")
        verdict = self._counted(plan)
        if verdict is None and cost is not None and plan in self._trials and alike:
            tried = self._tried_again if self.tries_again(plan) else self._tried
            verdict = tried(plan, cost)
        if verdict is not None and verdict.plan is not None:
            self._own[verdict.plan] = verdict.choice
        return verdict

    def _counted(self, plan: int) -> Verdict | None:
        """Count a step of a row, which may begin a second trial; end that of another plan."""
        last, self._last = self._last, plan
        self._row = self._row + 1 if plan == last else 1
        if self.tries_again(last) and (plan != last or self._row > self._trials[last].until):
            instead = self._trials.pop(last).instead
            assert instead is not None
            return Verdict(instead, last, "")
        present, wait = self._own.get(plan, self.choice), self._waits.get(plan, AGAIN)
        on_trial = self.takes_turns or plan in self._trials
        if plan and not on_trial and present is not Choice.FIRST and self._row >= wait:
            self._waits[plan] = 2 * wait
            self._trials[plan] = _Trial(None, present, self._row + LONGEST)
        return None

    def _tried_again(self, plan: int, cost: Cost) -> Verdict | None:
        """Take a step of a second trial: those of the present choice come first."""
        trial = self._trials[plan]
        trial.steps = steps = [*trial.steps, cost]
        known, present = trial.without, trial.instead
        if known is None:
            if len(steps) < TRIAL:
                return None
            trial.without, trial.steps = cost, []  # the first step follows one not recorded
            return Verdict(Choice.FIRST, plan, "")
        if len(steps) < (TRIAL if self._hides_transfers else FIRST_TRIAL):
            return None
        del self._trials[plan]
        if self._hides_transfers:
            worse = all(step.worse_than(known) for step in steps)
        else:
            worse = steps[-1].bytes > MORE * known.bytes
        if worse and present is not None:
            return Verdict(present, plan, "")
        return Verdict(Choice.FIRST, plan, _why(steps, known))

    def _tried(self, plan: int, cost: Cost) -> Verdict | None:
        trial = self._trials[plan]
        steps, known = [*trial.steps, cost], trial.without
        trial.steps = steps
        both, spare = not self._hides_transfers, Choice.SECOND in self._choices
        of_first = not trial.steps_of_first
        if len(steps) < (FIRST_TRIAL if both and spare and of_first else TRIAL):
            return None
        again = bool(trial.compared)
        if again:
            known = trial.without = steps[-1]  # the one before carries what the plan left behind
            steps, trial.compared = trial.compared, []
        failed = known is not None and all(step.worse_than(known) for step in steps)
        if again and not failed:
            del self._trials[plan]
            return Verdict(Choice.FIRST, plan, "")
        moves_more = known is not None and all(step.bytes > MORE * known.bytes for step in steps)
        if of_first and not both and moves_more and not failed:
            trial.compared, trial.steps = steps, []
            return Verdict(Choice.NONE, plan, "")
        if of_first and spare and (failed or (both and steps[-1].bytes > 0)):
            trial.steps_of_first, trial.steps = steps, []
            return Verdict(Choice.SECOND, plan, _why(steps, known))
        del self._trials[plan]
        if of_first or not both:
            return Verdict(Choice.NONE, plan, _why(steps, known)) if failed else None
        first, second = trial.steps_of_first[-1], steps[-1]
        most = MORE * min(c.bytes for c in (first, second, known) if c is not None)
        if first.bytes <= most:
            return Verdict(Choice.FIRST, plan, _why(steps, first))
        return None if second.bytes <= most else Verdict(Choice.NONE, plan, _why(steps, known))

    def _turned(self, plan: int, cost: Cost | None, ops: int, *, recording: bool) -> bool:
        """Take a step; return whether all plans have to follow `choice` from now on."""
        if self.over:
            return False
        if not self.takes_turns:
            self._recent.append(plan)
            if recording:
                self._recent.clear()  # while plans are made, steps differ in that
            alike = plan > 0 and len(set(self._recent)) == 1
            if len(self._recent) < RECENT or alike:
                return False
            self._begin_turn(self._choices[0])
            self.takes_turns = True
            return True  # a trial may have changed some plans
        assert cost is not None
        self._steps += 1
        if self._steps > SKIPPED:
            self._sums[self.choice][plan] = self._sums[self.choice][plan].plus(cost, max(ops, 1))
        if self._steps < TURN:
            return False
        following = self._choices[self._choices.index(self.choice) + 1 :]
        if following:
            self._begin_turn(following[0])
        else:
            self._end_turns()
        return True

    def _begin_turn(self, choice: Choice) -> None:
        self.choice, self._steps = choice, 0
        self._sums.setdefault(choice, defaultdict(_Sum))

    def _end_turns(self) -> None:
        kinds = set.intersection(*map(set, self._sums.values()))
        self.takes_turns, self.over = False, bool(kinds)
        self._recent.clear()
        self.choice = self._choices[0]
        if kinds:
            self._means = _means(self._sums, kinds)
            self.choice, self._sums = self._best(), {}
            return
        for of in self._sums.values():  # plans that were replaced have no further steps
            for old in [*of][: -core.MAX_PLANS]:
                del of[old]

    def _best(self) -> Choice:
        tried = list(self._means.items())
        if self._hides_transfers:
            kept = (c for c, cost in tried if not any(cost.worse_than(o) for _, o in tried))
            return next(kept, Choice.NONE)
        least = min(cost.bytes for _, cost in tried)
        return next(choice for choice, cost in tried if cost.bytes <= MORE * least)

    def _why_all(self) -> str:
        return ", ".join(
            f"{cost.bytes / 2**20:.0f} MiB and {cost.us / 1e3:.1f} ms a step by {choice.value}"
            for choice, cost in self._means.items()
        )


def _why(steps: list[Cost], other: Cost | None) -> str:
    moved, took = (statistics.fmean(each) for each in zip(*steps, strict=True))
    why = f"its steps moved {moved / 2**20:.0f} MiB in {took / 1e3:.1f} ms"
    if other is None:
        return why
    return f"{why}, and without it {other.bytes / 2**20:.0f} MiB in {other.us / 1e3:.1f} ms"


def _means(sums: dict[Choice, _Sums], kinds: set[int]) -> dict[Choice, Cost]:
    """Return the mean cost of a step by each choice, as if each had had the same kinds of steps.

    Steps of a kind may still differ in length: their costs are compared per op.
    """
    ops = {kind: sum(of[kind].ops for of in sums.values()) for kind in kinds}
    steps = sum(of[kind].steps for of in sums.values() for kind in kinds)
    means = {}
    for choice, of in sums.items():
        moved = sum(of[kind].bytes / of[kind].ops * ops[kind] for kind in kinds) / steps
        took = sum(of[kind].us / of[kind].ops * ops[kind] for kind in kinds) / steps
        means[choice] = Cost(round(moved), took)
    return means
