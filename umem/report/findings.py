"""Findings about a step in plain words: a figure, the setting that changes it, and its gain.

Each setting is tried: the step is replayed with it, and the finding has the figures of that replay.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from ..base.device_profiles import DeviceProfile
from ..base.progress import Advance, ignore
from ..base.units import FLOOR_PAGES, PAGE_BYTES, format_bytes, with_staging
from ..errors import UmemError
from ..policies import registry
from ..simulation import replay
from ..simulation.replay import Result
from ..trace.step_trace import StepTrace
from .causes import SMALL, Cause, Wait
from .timeline import OTHER, Timeline

_log = logging.getLogger("umem")

MIN_SHARE = 0.01  # of a step's time or bytes: anything below is not a finding
GONE = 0.05  # a stall of which only this share remains counts as removed
_GROUPS = 3  # groups of waits that are named
# Replay time is proportional to a step's ops. Max ops for so many halvings of the budget, and max
# ops for plans of recomputation and of updates on the host.
_TRIES = ((20_000, 6), (100_000, 3))
_PLANNED_OPS = 10_000


@dataclass(frozen=True)
class Finding:
    """One sentence with its figure. Times in µs; None if nothing was tried."""

    text: str
    setting: str = ""  # the setting that changes it; empty: none is known
    step_us: float | None = None  # the step with this setting
    weight: float = 0.0  # findings are sorted by it: the time at stake


@dataclass
class Trials:
    """Replays of one step with other settings, each made once."""

    step: StepTrace
    device: DeviceProfile
    host_budget: int = 0
    staged: bool = False  # a disk's transfers take a share of the option `budget`
    left_out: list[str] = field(default_factory=list)  # settings not tried, and why
    advance: Advance = ignore  # called with 1 for each setting tried
    _known: dict[tuple[str, int], Result | None] = field(default_factory=dict)

    def budget_of(self, result: Result) -> int:
        """Return the option `budget`, in bytes, with which a program has this replay's budget."""
        return with_staging(result.budget) if self.staged else result.budget

    def add(self, result: Result) -> None:
        """Add a replay made elsewhere."""
        self._known[result.policy, result.budget] = result

    def run(self, policy: str, budget: int) -> Result | None:
        """Replay with this policy and budget; None on an error, which `left_out` records."""
        key = policy, max(budget // PAGE_BYTES * PAGE_BYTES, replay.min_budget(self.step))
        if key not in self._known:
            try:
                self._known[key] = replay.replay_step(
                    self.step, policy, self.device, budget, host_budget=self.host_budget
                )
            except UmemError as error:
                self.left_out.append(f"policy {policy} with {format_bytes(budget)}: {error}")
                self._known[key] = None
            self.advance(1)
        return self._known[key]


def find(
    line: Timeline,
    waits: Sequence[Wait],
    causes: Sequence[Cause],
    trials: Trials,
    compared: Sequence[Result],
) -> list[Finding]:
    """Return the findings, the largest first."""  # fmt: skip
    result = line.result
    found = [_time(result)]
    if line.stall_us.sum() > MIN_SHARE * result.step_us:
        found += _stalls(line, waits, trials)
        found += _better_policy(result, compared)
        found += _recompute(line, trials)
        trials.advance(1)
        found += _host_updates(line, trials)
        trials.advance(1)
    else:
        found += _smaller_budget(line, trials)
    found += _unused(result, causes, compared)
    found += _never_moved(causes)
    return [found[0], *sorted(found[1:], key=lambda one: -one.weight)]


def parts(step: StepTrace) -> int:
    """Return the max number of settings that `find` tries: budgets, levers, their policy."""
    return 1 + _tries(step) + 3


def _ms(us: float) -> str:
    """Return the time with three digits, in the unit that its rounded value has."""
    text = f"{us / 1e3:.3g}"
    if float(text) < 1e3:
        return f"{text} ms"
    return f"{us / 1e6:.3g} s" if us < 999.5e6 else f"{us / 1e6:,.0f} s"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def _time(result: Result) -> Finding:
    if not result.compute_us:
        return Finding(
            "The trace has no times of operators, so neither the time of a step nor the share of "
            "transfers that compute hides is known; `umem trace record` records times."
        )
    stall = f"{_percent(result.stall_us / result.step_us)} of it stalls" if result.step_us else ""
    if result.stall_us < MIN_SHARE * result.step_us:
        stall = "it hardly stalls" if result.stall_us else "it does not stall"
    text = (
        f"A step takes {_ms(result.step_us)}: {stall}. "
        f"No schedule of moves is faster than {_ms(result.floor_us)} with "
        f"{format_bytes(result.budget)}."
    )
    return Finding(text)


_PLURALS = {
    "activation": "activations",
    "grad": "gradients",
    "input": "inputs",
    "optimizer": "optimizer states",
    "param": "parameters",
    "temp": "temporaries",
    "workspace": "workspaces",
}


def label(line: Timeline, tensor: int) -> str:
    """Return the group of a tensor, such as `conv activations`."""
    if tensor == OTHER:
        return SMALL
    return _group(line.step.tags[tensor] or "untagged", line.step.families[tensor])


@cache  # a large step has many tensors, and few groups
def _group(tag: str, family: str) -> str:
    plural = _PLURALS.get(tag, f"{tag} tensors")
    return f"{family} {plural}" if family else plural


def _stalls(line: Timeline, waits: Sequence[Wait], trials: Trials) -> list[Finding]:
    """Return the largest groups of waits, with the budget that removes the stall."""
    total = sum(wait.us for wait in waits)
    groups: defaultdict[tuple[str, str], list[Wait]] = defaultdict(list)
    for wait in waits:
        waited_for = "" if wait.why == "other" else label(line, wait.tensor)
        groups[wait.why, waited_for].append(wait)
    largest = sorted(groups.items(), key=lambda item: -sum(wait.us for wait in item[1]))
    enough = _enough(line.result, trials)
    found = []
    for (why, waited_for), mine in largest[:_GROUPS]:
        us = sum(wait.us for wait in mine)
        if us < MIN_SHARE * line.result.step_us:
            break
        text = f"{_percent(us / total)} of the stall ({_ms(us)}) {_cause(why, waited_for, mine)}"
        if enough is None:
            found.append(Finding(text + ".", weight=us))
            continue
        left = enough.stall_us / line.result.stall_us
        all_of_it = f"all of the stall but {_percent(left)}" if left >= 0.001 else "the whole stall"
        budget = trials.budget_of(enough)
        text += f"; a budget of {format_bytes(budget)} would remove {all_of_it}"
        found.append(Finding(f"{text}.", f"budget={budget >> 20}MiB", enough.step_us, us))
    return found


def _cause(why: str, waited_for: str, mine: Sequence[Wait]) -> str:
    if why == "late":
        late = _middle(mine)
        return f"waits for {waited_for} fetched {late} operator{'s' * (late != 1)} late"
    if why == "fault":
        return f"waits for {waited_for} that were not fetched ahead, by page faults"
    if why == "room":
        return f"waits until other bytes have left, to free memory for {waited_for}"
    if why == "host":
        return f"waits for the host's work on {waited_for}"
    if why == "queue":
        return f"waits behind {waited_for}, which are fetched for later operators"
    return "has no transfer as its cause"


def _middle(mine: Sequence[Wait]) -> int:
    """Return the median lateness of fetches in operators, weighted by their cost in time."""
    ordered = sorted(mine, key=lambda wait: wait.late_ops)
    sums = np.cumsum([wait.us for wait in ordered])
    return ordered[int(np.searchsorted(sums, sums[-1] / 2))].late_ops


def _tries(step: StepTrace) -> int:
    """Return the number of halvings of the budget interval; 0: no other budget is tried."""
    return next((tries for ops, tries in _TRIES if step.n_ops <= ops), 0)


def _halvings(trials: Trials) -> int:
    """Return `_tries`, and note if it is 0."""
    tries = _tries(trials.step)
    if not tries:
        trials.left_out.append(f"other budgets: for steps of up to {_TRIES[-1][0]:,} operators")
    return tries


def _fits(step: StepTrace) -> int:
    """Return a budget at which the step moves little or nothing."""
    pages = -(-step.peak_bytes // PAGE_BYTES) + step.small_bytes // PAGE_BYTES + FLOOR_PAGES
    return pages * PAGE_BYTES


def _enough(result: Result, trials: Trials) -> Result | None:
    """Return the replay with the smallest budget found that removes the stall."""
    tries = _halvings(trials)
    most = min(_fits(trials.step), trials.device.memory_bytes)
    low, high = result.budget // PAGE_BYTES, most // PAGE_BYTES
    best = trials.run(result.policy, high * PAGE_BYTES) if tries and high > low else None
    if best is None or best.stall_us > GONE * result.stall_us:
        return None
    for _ in range(tries):
        middle = (low + high) // 2
        if middle in (low, high):
            break
        tried = trials.run(result.policy, middle * PAGE_BYTES)
        if tried is not None and tried.stall_us <= GONE * result.stall_us:
            best, high = tried, middle
        else:
            low = middle
    return best


def _smaller_budget(line: Timeline, trials: Trials) -> list[Finding]:
    """Return the smallest budget found that costs nothing, for a step without stalls."""
    result, best = line.result, None
    low, high = replay.min_budget(line.step) // PAGE_BYTES, result.budget // PAGE_BYTES
    for _ in range(_halvings(trials)):
        middle = (low + high) // 2
        if middle in (low, high):
            break
        tried = trials.run(result.policy, middle * PAGE_BYTES)
        if tried is not None and tried.step_us <= (1 + MIN_SHARE) * result.step_us:
            best, high = tried, middle
        else:
            low = middle
    if best is None:
        return []
    less = trials.budget_of(best)
    text = (
        f"The budget of {format_bytes(trials.budget_of(result))} is more than the step needs: with "
        f"{format_bytes(less)} it is as fast, within {_percent(MIN_SHARE)}."
    )
    return [Finding(text, f"budget={less >> 20}MiB", best.step_us, result.step_us)]


def _better_policy(result: Result, compared: Sequence[Result]) -> list[Finding]:
    best = min(compared, key=lambda one: one.step_us, default=result)
    gain = result.step_us - best.step_us
    if gain < MIN_SHARE * result.step_us or best.policy == result.policy:
        return []
    text = (
        f"Under policy {best.policy} the step is {_percent(gain / result.step_us)} shorter than "
        f"under {result.policy}, with the same budget."
    )
    return [Finding(text, f"policy={best.policy}", best.step_us, gain)]


def _recompute(line: Timeline, trials: Trials) -> list[Finding]:
    """Try to drop activations and compute them again."""
    from ..recompute.planner.graph import RecomputeGraph
    from ..recompute.planner.modes import RecomputePlanner

    step, result = line.step, line.result
    if reason := _unplanned(step):
        trials.left_out.append(f"recomputation: {reason}")
        return []
    try:
        graph = RecomputeGraph(step)
        if not graph.droppable.any():
            return []
        planner = RecomputePlanner(graph, line.device, result.budget)
        done = replay.simulate_recompute(planner, "auto", host_budget=trials.host_budget)
    except UmemError as error:
        trials.left_out.append(f"recomputation: {error}")
        return []
    if done is None:
        return []
    if not done.new.recompute_us:
        return []
    work = f"{_ms(done.new.recompute_us)} of compute"
    how = f"Computing some activations again ({work}) instead of moving them"
    return _shorter(line, trials, done.result, how, "recompute=auto")


def _host_updates(line: Timeline, trials: Trials) -> list[Finding]:
    """Try to update parameters on the host, where the optimizer's state is then."""
    from ..recompute.planner.host_updates import SHARES, candidates

    step, result = line.step, line.result
    if reason := _unplanned(step):
        trials.left_out.append(f"updates on the host: {reason}")
        return []
    if not candidates(step).updates:
        return []
    try:
        _, best = replay.replay_shares(
            step, SHARES, registry.DEFAULT, line.device, result.budget,
            host_budget=trials.host_budget,
        )  # fmt: skip
    except UmemError as error:
        trials.left_out.append(f"updates on the host: {error}")
        return []
    if not best.host_us:
        return []
    how = f"Updating parameters on the host ({_ms(best.host_us)} of its work)"
    return _shorter(line, trials, best, how, "optimizer=auto")


def _shorter(
    line: Timeline, trials: Trials, found: Result, how: str, setting: str
) -> list[Finding]:
    """Return the finding that `found`, a replay with `setting`, is shorter than without it.

    `found` is under the default policy. If the step is shown under a slower one, the default
    policy's own gain is not that of the setting.
    """
    shown = line.result
    plain = trials.run(registry.DEFAULT, shown.budget) or shown
    step_us = min(shown.step_us, plain.step_us)
    gain = step_us - found.step_us
    if gain < MIN_SHARE * step_us:
        return []
    than = f" than policy {registry.DEFAULT} alone" if step_us < shown.step_us else ""
    text = f"{how} makes the step {_percent(gain / step_us)} shorter{than}."
    return [Finding(text, _also(shown, setting), found.step_us, gain)]


def _unplanned(step: StepTrace) -> str:
    """Return why neither recomputation nor updates on the host are tried; empty if they are."""
    if step.updates is not None:
        return "the step already has updates on the host"
    return f"for steps of up to {_PLANNED_OPS:,} operators" if step.n_ops > _PLANNED_OPS else ""


def _also(result: Result, setting: str) -> str:
    """Return the setting, and the default policy where the step is shown under another."""
    return setting if result.policy == registry.DEFAULT else f"policy={registry.DEFAULT} {setting}"


def _unused(result: Result, causes: Sequence[Cause], compared: Sequence[Result]) -> list[Finding]:
    unused = next(cause.bytes for cause in causes if cause.name == "in, unused")
    if not result.bytes_in or unused < MIN_SHARE * result.bytes_in:
        return []
    share = unused / result.bytes_in
    text = f"{format_bytes(unused)}, {_percent(share)} of the bytes in, were fetched and not used."
    fewer = [
        one for one in compared if one.prefetched_unused < unused and one.policy != result.policy
    ]
    best = min(fewer, key=lambda one: one.step_us, default=None)
    if best is None or best.step_us > result.step_us:
        return [Finding(text, weight=share * result.stall_us)]
    text += f" Policy {best.policy} wastes {format_bytes(best.prefetched_unused)}."
    return [Finding(text, f"policy={best.policy}", best.step_us, share * result.stall_us)]


def _never_moved(causes: Sequence[Cause]) -> list[Finding]:
    dead = next(cause.bytes for cause in causes if cause.name == "dead, never moved")
    out = sum(cause.bytes for cause in causes if cause.name.startswith("out"))
    if not dead or not out:
        return []
    text = (
        f"{format_bytes(dead)} of dead contents were never moved: without knowing that they are "
        f"dead, up to {format_bytes(dead + out)} would have left instead of {format_bytes(out)}."
    )
    return [Finding(text)]
