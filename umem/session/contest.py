"""The contest of choices: what plans do, what their spare ones do, or nothing, where steps vary."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from .plan_guard import MORE, Cost

RECENT = 8  # steps that are looked at to tell whether the program's vary
STEPS = 12  # of each choice
SKIPPED = 2  # of them, which still carry what the choice before left behind


class _Sum(NamedTuple):
    """The costs of some steps of one kind, and the ops in them."""

    ops: int = 0
    steps: int = 0
    bytes: int = 0
    us: float = 0.0

    def plus(self, cost: Cost, ops: int) -> _Sum:
        return _Sum(self.ops + ops, self.steps + 1, self.bytes + cost.bytes, self.us + cost.us)


_Sums: TypeAlias = "defaultdict[int, _Sum]"  # by the plan that the steps went by


class Choice(Enum):
    """A choice that all plans make: for their steps, what they do."""

    FIRST = "its plans"
    SECOND = "their spare ones"
    NONE = "lru"


class Contest:
    """Tries all choices in turn, each for some steps, and keeps the one that costs the least.

    Where steps of several kinds alternate, or no two are alike, what a step costs depends on the
    steps around it: a plan cannot be judged by a few steps of its own, as `PlanGuard` does. So all
    plans change together. The choices are tried once, when the steps of a program vary and none is
    recorded any more. Steps are compared with those of the same kind: those that went by the same
    plan, or by none. If there are no such steps, the choices are tried again later.

    Args:
        choices: those that there are, the preferred one first.
        hides_transfers: whether the device moves bytes beside compute. If so, a choice is dropped
            that moves more and takes longer than another one; else the fewest bytes count.
    """

    def __init__(self, choices: Sequence[Choice], *, hides_transfers: bool) -> None:
        self._hides_transfers = hides_transfers
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._choices = tuple(choices)
        self._steps = 0  # of the choice that is tried now
        self._sums: dict[Choice, _Sums] = {}
        self._means: dict[Choice, Cost] = {}
        self.choice = self._choices[0]
        self.running = self.over = False

    def step_ended(
        self, plan: int, cost: Cost | None, *, ops: int, recording: bool
    ) -> Choice | None:
        """Take the cost of a step; return the choice from now on where it is another one.

        Args:
            plan: the number of the plan that the step went by, 0 without one.
            cost: of the step; needed while the contest is `running`.
            ops: in the step, as far as plans know them.
            recording: whether steps are recorded, which takes time.
        """
        if self.over:
            return None
        if not self.running:
            self._recent.append(plan)
            if recording:
                self._recent.clear()  # while plans are made, steps differ in that
            alike = plan > 0 and len(set(self._recent)) == 1
            if len(self._recent) < RECENT or alike:
                return None
            self._begin(self._choices[0])
            self.running = True
            return self.choice  # some plans may do something else by now
        assert cost is not None
        self._steps += 1
        if self._steps > SKIPPED:
            self._sums[self.choice][plan] = self._sums[self.choice][plan].plus(cost, max(ops, 1))
        if self._steps < STEPS:
            return None
        following = self._choices[len(self._sums) :]
        if following:
            self._begin(following[0])
        else:
            self._end()
        return self.choice

    def _begin(self, choice: Choice) -> None:
        self.choice, self._steps = choice, 0
        self._sums[choice] = defaultdict(_Sum)

    def _end(self) -> None:
        kinds = set.intersection(*map(set, self._sums.values()))
        self.running, self.over = False, bool(kinds)
        self._recent.clear()
        if kinds:
            self._means = _means(self._sums, kinds)
        self.choice = self._best() if kinds else self._choices[0]
        self._sums = {}

    def _best(self) -> Choice:
        tried = list(self._means.items())
        if self._hides_transfers:
            kept = (c for c, cost in tried if not any(cost.worse_than(o) for _, o in tried))
            return next(kept, Choice.NONE)
        least = min(cost.bytes for _, cost in tried)
        return next(choice for choice, cost in tried if cost.bytes <= MORE * least)

    def why(self) -> str:
        """Say what was measured."""
        return ", ".join(
            f"{cost.bytes / 2**20:.0f} MiB and {cost.us / 1e3:.1f} ms a step by {choice.value}"
            for choice, cost in self._means.items()
        )


def _means(sums: dict[Choice, _Sums], kinds: set[int]) -> dict[Choice, Cost]:
    """Return the mean cost of a step by each choice, as if each had had the same kinds of steps.

    Steps of a kind may still differ in length: their costs are compared by the op.
    """
    ops = {kind: sum(of[kind].ops for of in sums.values()) for kind in kinds}
    steps = sum(of[kind].steps for of in sums.values() for kind in kinds)
    means = {}
    for choice, of in sums.items():
        moved = sum(of[kind].bytes / of[kind].ops * ops[kind] for kind in kinds) / steps
        took = sum(of[kind].us / of[kind].ops * ops[kind] for kind in kinds) / steps
        means[choice] = Cost(round(moved), took)
    return means
