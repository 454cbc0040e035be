"""A step under a policy, in virtual time: the engine that runs programs, without memory.

The native runtime is replayed on a software device that holds no data, so figures are those of the
engine itself, and depend on nothing but trace, policy, device and budget.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ..analysis import bounds
from ..base import collector
from ..base.device_profiles import DeviceProfile
from ..base.progress import Advance, ignore, over, progress
from ..base.units import FLOOR_PAGES, PAGE_BYTES, format_bytes
from ..errors import ConfigError, OutOfMemoryError, PlanError, TraceError, shown
from ..policies import registry
from ..policies.base import Plan, PlanFunction, Policy
from ..policies.lowering import lower
from ..policies.plan_check import as_plan, check, summary
from ..trace import origin
from ..trace.device_split import DeviceSplit
from ..trace.event_columns import by_step
from ..trace.ids import BlockId
from ..trace.reader import read
from ..trace.segments import with_segments
from ..trace.step_builder import StepBuilder
from ..trace.step_trace import Floats, Ints, StepTrace

if TYPE_CHECKING:
    from ..base.native import core
    from ..recompute.planner.graph import RecomputeGraph
    from ..recompute.planner.host_updates import Update
    from ..recompute.planner.modes import RecomputePlanner
    from ..recompute.planner.rewrite import Rewritten

_log = logging.getLogger("umem")

REPEATS = 6  # steps at most until two in a row are equal
FINER = 2  # shares of updates on the host are tried at half the distance so many times
STEADY = 1e-3  # the share by which they may differ
_ADDRESSED = 1 << 40  # bytes of a step that a replay finds addresses for, at any budget it needs
_VICTIMS = "`victims` is asked in programs only"
_PLANNED = 1 << 48  # bytes of a step's tensors together; planning takes columns of their pieces

_Asked = TypeVar("_Asked")
_Done = TypeVar("_Done")


@dataclass(frozen=True)
class Result:
    """One replay; figures are of the last step, times in µs of virtual time, sizes in bytes."""

    policy: str
    budget: int  # that was replayed
    device: str
    steps: int  # of the whole replay
    step_us: float
    compute_us: float
    stall_us: float
    host_us: float  # that the host works on updates
    floor_us: float  # no schedule is below, in steady state (analysis/bounds.py)
    bytes_in: int
    bytes_out: int
    bound_bytes_in: int  # no schedule is below
    bytes_discarded: int
    faults: int
    evictions: int
    prefetches: int
    prefetched_unused: int
    peak_resident: int
    events: int  # of the whole replay
    events_per_s: float  # in real time
    plan_hits: int  # ops that followed the plan
    plan_misses: int
    raised_from: int | None  # the budget asked for, where no op of that size could be held
    peak_host: int  # of the whole replay; what was evicted once keeps its host pages until freed
    share: float | None = None  # of the updates on the host, from `replay_shares`

    def __str__(self) -> str:
        ratio = self.step_us / self.compute_us if self.compute_us else 1.0
        return (
            f"{self.policy} on {self.device} with {format_bytes(self.budget)}: "
            f"{self.step_us / 1e3:.2f} ms a step, {ratio:.2f} x compute "
            f"(lower bound {self.floor_us / 1e3:.2f} ms); "
            f"{format_bytes(self.bytes_in)} in, {format_bytes(self.bytes_out)} out"
        )

    @property
    def rank(self) -> tuple[int, float]:
        """The key to compare by: what fits the budget that was asked for comes first."""
        return (0 if self.raised_from is None else self.budget), self.step_us

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `raised_from` and `share` are there only where they are known."""
        fields = asdict(self)
        return {
            name: value
            for name, value in fields.items()
            if value is not None or name not in ("raised_from", "share")
        }


class Recomputed(NamedTuple):
    """A step as a way to recompute rewrites it, and its replay."""

    mode: str
    new: Rewritten
    result: Result  # of the default policy, on the rewritten step


class HostUpdated(NamedTuple):
    """A step whose parameters the host updates in part, and its replay."""

    share: float  # of the bytes of all parameters whose updates the host can do
    updates: tuple[Update, ...]  # that the host does
    recomputed: Recomputed

    @property
    def step_us(self) -> float:
        """The step's time in µs."""
        return self.recomputed.result.step_us

    @property
    def rank(self) -> tuple[int, float]:
        """The key to compare shares by: the budget if it was raised, and the step's time."""
        return self.recomputed.result.rank


class Logged(NamedTuple):
    """A replay, and what its last step did with pages; times in µs since that step began."""

    result: Result
    op_end_us: Floats  # [n]
    moves: dict[str, Any]  # columns of core.Replay.moves
    placed: Ints  # [m] the address of each tensor in the last step; 0: it had none


class LoadedTrace(NamedTuple):
    """The part of a trace that a replay needs."""

    step: StepTrace  # the last complete one
    peak_bytes: int  # of live bytes over all steps, as tensors take them on the device
    device: str  # that the trace names
    source: str  # the program that wrote it
    # The origins of that step's blocks, "module · file:line", as far as the trace has them.
    origins: Mapping[BlockId, str]
    staged: bool  # a disk's transfers took a share of the option `budget`


def replay_step(
    step: StepTrace,
    policy: Policy | PlanFunction | str,
    device: DeviceProfile,
    budget: int,
    *,
    host_budget: int = 0,
    repeats: int = REPEATS,
) -> Result:
    """Repeat a step until it is steady: two in a row within 0.1 %, or `repeats` of them.

    Args:
        step: what is repeated; tensors that persist are there before the first time.
        policy: a policy or its name. It plans once, from `step`.
        device: the link and the cost of faults; its memory is as large as the budget.
        budget: bytes on the device, raised to the least at which policies compare.
        host_budget: bytes that evicted tensors may take; 0 for any number.
        repeats: steps at most, 1 and up.

    Raises:
        ConfigError: no such policy, or a bad `repeats`.
        PlanError: the step is larger than any that can be planned, or the plan is refused.
        OutOfMemoryError: device and host budget cannot hold the step.
        StateError: umem is on in this process, or another replay runs.
    """
    return _replay(step, policy, device, budget, host_budget=host_budget, repeats=repeats)


def replay_logged(
    step: StepTrace,
    policy: Policy | PlanFunction | str,
    device: DeviceProfile,
    budget: int,
    *,
    host_budget: int = 0,
) -> Logged:
    """Replay as `replay_step`, with a log of the last step; three steps at least.

    Raises:
        ConfigError, PlanError, OutOfMemoryError, StateError: as `replay_step`.
    """
    found: list[tuple[Floats, dict[str, Any], Ints]] = []

    def run(replay: core.Replay, repeats: int) -> dict[str, Any]:
        replay.run_step(1)  # it is not like the others: nothing came before it
        figures = _until_steady(replay, repeats - 1, replay.run_logged)
        found.append((replay.op_end_us(), replay.moves(), replay.placed()))
        return figures

    result = _replay(step, policy, device, budget, host_budget=host_budget, run=run)
    return Logged(result, *found[0])


def load(path: str | os.PathLike[str]) -> LoadedTrace:
    """Read and check a whole trace of one device.

    Raises:
        TraceError: the file is no valid trace, the step has no op that accesses memory, or there
            are blocks of several devices: `load_devices` splits them.
    """
    found = load_devices(path)
    if len(found) > 1:
        raise TraceError(
            f"{path}: a trace of devices {', '.join(map(str, found))}; replay each of them: umem "
            "replay, or umem.simulation.replay.load_devices"
        )
    return next(iter(found.values()))


@collector.paused()  # events are in no cycles
def load_devices(
    path: str | os.PathLike[str], *, partial: bool = False, show: bool = False
) -> dict[int, LoadedTrace]:
    """Read and check a whole trace, split into one for each device whose blocks a step uses.

    Args:
        path: the file.
        partial: keep the whole lines of a file that is cut off, as a killed program leaves it.
        show: draw the progress where standard error is a terminal.

    Raises:
        TraceError: the file is no valid trace, or no step has an op that accesses memory.
    """
    split, used = DeviceSplit(), frozenset[int]()  # devices of the last step
    builders = defaultdict(StepBuilder, {0: StepBuilder()})
    title = f"reading {Path(path).name}"
    with progress(title, _size(path) if show else 0, quiet=not show) as advance:
        header, events = read(path, partial=partial, advance=advance)
        for columns in by_step(events):
            for device, own in split.take(columns).items():
                builders[device].take(own)
            used = split.used or used
    found: dict[int, LoadedTrace] = {}
    reason: TraceError | None = None
    for device, builder in sorted(builders.items()):
        if used and device not in used:
            continue  # it had ops in earlier steps only
        try:
            step = builder.step()
        except TraceError as error:  # none of its blocks was used
            reason = reason or error
        else:
            found[device] = LoadedTrace(
                step,
                builder.peak_bytes,
                header.device,
                header.source,
                origin.of_blocks(builder.events()),
                "staging" in (header.extra or {}),
            )
    if not found:
        raise TraceError(f"{path}: {reason}") from None
    return found


def _size(path: str | os.PathLike[str]) -> int:
    """Return the bytes of the file; 0 where it cannot be read, which its reader says."""
    try:
        return Path(path).stat().st_size
    except (OSError, ValueError):
        return 0


def simulate_recompute(
    planner: RecomputePlanner, mode: str, *, host_budget: int = 0
) -> Recomputed | None:
    """Replay a step as a mode of `recompute.planner` rewrites it; None where the mode has no way.

    The mode auto is the fastest in replay of the planner's shortlist. Evicted tensors may take
    `host_budget` bytes; 0 for any number.

    Raises:
        ConfigError: there is no such mode.
        OutOfMemoryError, StateError: as `simulate`.
    """
    rewritten = planner.shortlist() if mode == "auto" else [planner.plan(mode)]

    def replayed(new: Rewritten) -> Recomputed:
        result = replay_step(
            new.step, registry.DEFAULT, planner.device, planner.budget, host_budget=host_budget
        )
        return Recomputed(mode, new, result)

    done = _that_fit(replayed, [new for new in rewritten if new is not None])
    return min(done, key=lambda one: one.result.step_us, default=None)


def _that_fit(run: Callable[[_Asked], _Done], asked: Sequence[_Asked]) -> list[_Done]:
    """Run each; leave out those that do not fit the host, unless none does.

    Raises:
        OutOfMemoryError: of the first.
    """
    done, refused = [], None
    for one in asked:
        try:
            done.append(run(one))
        except OutOfMemoryError as error:
            refused = refused or error
    if refused is not None and not done:
        raise refused
    return done


def replay_shares(
    step: StepTrace,
    shares: Sequence[float],
    policy: Policy | PlanFunction | str,
    device: DeviceProfile,
    budget: int,
    *,
    host_budget: int = 0,
    repeats: int = REPEATS,
) -> tuple[StepTrace, Result]:
    """Replay a step with each of these shares of its updates on the host; return the fastest.

    Shares whose states do not fit the host budget are left out, unless none fits. The result's
    `compute_us` is that of the step without the updates that the host does.

    Raises:
        ConfigError, PlanError, OutOfMemoryError, StateError: as `replay_step`.
    """
    from ..recompute.planner.host_updates import candidates, on_host

    found = candidates(step)

    def replayed(share: float) -> tuple[StepTrace, Result]:
        new = on_host(step, found.first(share), device)
        result = replay_step(new, policy, device, budget, host_budget=host_budget, repeats=repeats)
        return new, replace(result, share=share if found.updates else None)

    return min(_that_fit(replayed, shares), key=lambda tried: tried[1].rank)


def simulate_updates(
    graph: RecomputeGraph,
    device: DeviceProfile,
    budget: int,
    share: float | None = None,
    *,
    advance: Advance = ignore,
) -> HostUpdated:
    """Replay a step with all four levers: keep, swap, recompute, and update on the host.

    Args:
        graph: of the plain step.
        device: the link, the host's rate, and the cost of faults.
        budget: bytes on the device.
        share: of the parameters' bytes that the host updates, those with the most time for it
            first; None: the share that is fastest in replay, of five and then of shares next to the
            best of these, halving the distance `FINER` times.
        advance: is called with 1 for each share that is done, `shares_tried` times.

    Raises:
        OutOfMemoryError, StateError: as `simulate`.
    """
    search = _Shares(graph, device, budget)
    if share is not None:
        found = search.at(share)
        advance(1)
        return found
    from ..recompute.planner.host_updates import SHARES

    for some in over(sorted(SHARES, reverse=True), advance):
        search.at(some)
    width = SHARES[1] / 2
    for _ in range(FINER):
        best = search.best().share
        for near in (best + width, best - width):
            if 0 < near < 1:
                search.at(near)
            advance(1)
        width /= 2
    return search.best()


def shares_tried(share: float | None) -> int:
    """Return how many shares `simulate_updates` tries."""
    from ..recompute.planner.host_updates import SHARES

    return len(SHARES) + 2 * FINER if share is None else 1


class _Shares:
    """The shares of a step's updates that have been looked at."""

    def __init__(self, graph: RecomputeGraph, device: DeviceProfile, budget: int) -> None:
        from ..recompute.planner.host_updates import candidates

        self.graph, self.device, self.budget = graph, device, budget
        self.candidates = candidates(graph.step)
        self.found: dict[tuple[Update, ...], HostUpdated] = {}

    def at(self, share: float) -> HostUpdated:
        """Plan and replay a share, once for each set of updates."""
        from ..recompute.planner.graph import RecomputeGraph
        from ..recompute.planner.host_updates import on_host
        from ..recompute.planner.modes import RecomputePlanner

        chosen = self.candidates.first(share)
        if chosen not in self.found:
            step = on_host(self.graph.step, chosen, self.device)
            graph = RecomputeGraph(step, self.graph.forward)
            # Steps of other shares have the same tensors: what is good there is a start here.
            good = [self.best().recomputed.new.selection] if self.found else []
            planner = RecomputePlanner(graph, self.device, self.budget, good)
            done = simulate_recompute(planner, "auto")
            assert done is not None, "mode auto always has a way"
            self.found[chosen] = HostUpdated(self.candidates.share_of(chosen), chosen, done)
        return self.found[chosen]

    def best(self) -> HostUpdated:
        return min(self.found.values(), key=lambda one: (*one.rank, one.share))


def min_budget(step: StepTrace) -> int:
    """Return the minimum budget, in bytes, of a replay of this step; it raises others to it."""
    return max(bounds.min_budget(step), FLOOR_PAGES * PAGE_BYTES)


def resident_budget(step: StepTrace, device: DeviceProfile) -> int:
    """Return the minimum budget, in bytes, at which a repeating step moves nothing.

    It is the peak in whole pages, and what segments of small tensors hold beyond these. A peak
    above 1 TiB has no address space for a replay: then it is the peak and all small tensors' own.

    Raises:
        StateError: umem is on in this process, or another replay runs.
    """
    if step.peak_bytes > _ADDRESSED:
        return -(-step.peak_bytes // PAGE_BYTES) * PAGE_BYTES + step.small_bytes
    low = max(step.peak_bytes // PAGE_BYTES, FLOOR_PAGES) - 1
    high, more, most = low + 1, 1, 2 * (low + 1 + FLOOR_PAGES)
    while high < most and _moves(step, device, high):  # often the peak is enough
        low, high, more = high, high + more, 2 * more
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _moves(step, device, middle) else (low, middle)
    return high * PAGE_BYTES


def _moves(step: StepTrace, device: DeviceProfile, pages: int) -> bool:
    replay = open_step(step, "lru", device, pages * PAGE_BYTES)
    try:
        figures = _until_steady(replay, REPEATS)
    finally:
        replay.close()
    return bool(figures["bytes_in"] or figures["bytes_out"])


def open_step(step: StepTrace, policy: str, device: DeviceProfile, budget: int) -> core.Replay:
    """Open the native replay of a step, to be run step by step under a native policy, and closed.

    Raises:
        OutOfMemoryError, StateError: as `simulate`.
    """
    from ..base.native import core

    replay = core.Replay(_options(policy, device, budget, host_budget=0))
    try:
        replay.set_step(columns_of(step))
    except BaseException:
        replay.close()
        raise
    return replay


@collector.paused()  # a large plan has as many tuples as moves, in no cycles
def _replay(
    step: StepTrace,
    policy: Policy | PlanFunction | str,
    device: DeviceProfile,
    budget: int,
    *,
    host_budget: int,
    repeats: int = REPEATS,
    run: Callable[[core.Replay, int], dict[str, Any]] | None = None,
) -> Result:
    from ..base.native import core

    if type(repeats) is not int or repeats < 1:
        raise ConfigError(
            f"repeats={shown(repeats)}: the figures are of a repeat; allowed: a whole number from 1"
        )
    if (total := step.bytes.sum(dtype=np.float64)) > _PLANNED:
        raise PlanError(
            f"the step's tensors have {format_bytes(int(total))} together; allowed: "
            f"{format_bytes(_PLANNED)}"
        )
    # The replay allocates each tensor by itself, at an address of its own.
    if step.whole is not None:
        step = replace(step, whole=None, offset=None, cut=None)
    if step.place is not None:
        step = replace(step, place=None)
    name, policy = registry.name_of(policy), registry.make(policy)
    room = max(budget // PAGE_BYTES * PAGE_BYTES, min_budget(step))
    plan: Plan | None = None
    tensors = np.arange(step.n_tensors)
    # As in a program, where small tensors lie shows before the step is planned. The columns of
    # updates on the host name tensors, which are not put into segments then.
    in_segments = not (_is_native(policy) or step.large.all() or step.updates is not None)
    if in_segments:
        ample = 2 * step.peak_bytes + FLOOR_PAGES * PAGE_BYTES
        options = _options("planned", device, ample, host_budget)
    else:
        plan = _plan(policy, step, device, room)
        options = _options(_native_name(policy, plan), device, room, host_budget)
    replay = core.Replay(options)
    try:
        replay.set_step(columns_of(step))
        if in_segments:
            addresses = _small_addresses(replay, step)
            plan = _plan(policy, with_segments(step, addresses), device, room)
            if plan is None:
                raise _no_plan(policy)
            if plan.trace.place is not None:  # it may be of the step without segments
                tensors = tensors[addresses == 0]
            core.set_budget(room, host_budget)
        if plan is not None and plan.trace.large[plan.trace.access_tensor].any():  # else no moves
            core.install_plan(lower(plan, lambda t: replay.address(int(tensors[t])), alone=True))
        figures = (run or _until_steady)(replay, repeats)
    finally:
        replay.close()
    return Result(
        policy=name,
        budget=room,
        device=device.name,
        floor_us=bounds.closed_form_floor(step, device, room).us,
        bound_bytes_in=bounds.lower_bound_bytes_in(step, room),
        raised_from=budget if room > budget else None,
        **_measured(figures),
    )


def _small_addresses(replay: core.Replay, step: StepTrace) -> Ints:
    """Return where the step's small tensors lie; 0: unknown, or no small tensor."""
    replay.run_step(2)
    return np.where(step.large, 0, replay.placed())


def _plan(policy: Policy, step: StepTrace, device: DeviceProfile, budget: int) -> Plan | None:
    plan = as_plan(policy, policy.plan(step, device, budget))
    if plan is not None and not registry.is_built_in(policy):
        if problems := check(plan):
            _log.warning("%s", summary(policy, problems))
        if hasattr(policy, "victims"):
            _log.warning("policy %s: %s", policy.name, _VICTIMS)
    return plan


def _is_native(policy: Policy) -> bool:
    from ..base.native import core

    return registry.is_built_in(policy) and policy.name in core.policies()


def _native_name(policy: Policy, plan: Plan | None) -> str:
    if plan is not None:
        return "planned"
    if _is_native(policy):
        return policy.name
    raise _no_plan(policy)


def _no_plan(policy: Policy) -> ConfigError:
    why = f"{_VICTIMS}, so " if hasattr(policy, "victims") else ""
    return ConfigError(
        f"the policy {policy.name!r} made no plan for this step, and is no native policy: "
        f"{why}its plan() must return a Plan to be replayed"
    )


def _options(policy: str, device: DeviceProfile, budget: int, host_budget: int) -> core.Options:
    from ..base.native import core

    options = core.Options()
    options.device = "soft"
    known = [profile["name"] for profile in core.profiles()]
    options.profile = device.name if device.name in known else known[0]
    options.link_in_bytes_per_us = device.bytes_per_us_in
    options.link_out_bytes_per_us = device.bytes_per_us_out
    options.fault_us = device.fault_us or sys.float_info.min  # 0 is that of the native profile
    options.budget_bytes = budget
    options.host_budget_bytes = host_budget
    options.min_swap_bytes = PAGE_BYTES
    options.floor_bytes = FLOOR_PAGES * PAGE_BYTES
    options.policy = policy
    return options


def columns_of(step: StepTrace) -> dict[str, Any]:
    """Return the columns of `core.Replay.set_step`."""
    updates = {} if step.updates is None else step.updates._asdict()
    number = {name: at for at, name in enumerate(dict.fromkeys(step.op_names))}
    return {
        "names": [*number],
        "op_name": np.fromiter((number[name] for name in step.op_names), np.int64, step.n_ops),
        **_parts(step),
        **{f"update_{name}": column for name, column in updates.items()},
        "op_us": step.op_us,
        "bytes": step.bytes,
        "large": step.large,
        "tag": list(step.tags),
        "family": list(step.families),
        "kind": step.kind,
        "first": step.first,
        "last": step.last,
        "next_alias": step.next_alias,
        "access_start": step.access_start,
        "access_tensor": step.access_tensor,
        "access_write": step.access_write,
    }


def _parts(step: StepTrace) -> dict[str, Any]:
    if step.access_part is None or step.parts is None:
        return {}
    rows = np.diff(step.parts.start)
    accesses = np.flatnonzero(step.access_part >= 0)
    which = step.access_part[accesses]
    at = np.concatenate(
        [np.arange(*step.parts.start[s : s + 2]) for s in which.tolist()] or [which]
    )
    return {
        "part_access": np.repeat(accesses, rows[which]),
        "part_begin": step.parts.begin[at],
        "part_end": step.parts.end[at],
    }


def _until_steady(
    replay: core.Replay, repeats: int, run: Callable[[], None] | None = None
) -> dict[str, Any]:
    run = run or partial(replay.run_step, 1)
    run()
    figures = replay.figures()
    for _ in range(repeats - 1):
        before = figures
        run()
        figures = replay.figures()
        if all(_near(figures[key], before[key]) for key in ("step_us", "bytes_in", "bytes_out")):
            break
    return figures


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= STEADY * max(abs(value), abs(other))


def _measured(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a Result that the engine counted."""
    same = (
        "steps", "step_us", "compute_us", "stall_us", "host_us", "bytes_in", "bytes_out",
        "bytes_discarded", "faults", "evictions", "prefetches", "events", "plan_hits",
        "plan_misses",
    )  # fmt: skip
    seconds = figures["seconds"]
    return {
        **{name: figures[name] for name in same},
        "prefetched_unused": figures["prefetched_unused_bytes"],
        "peak_resident": figures["peak_resident_bytes"],
        "peak_host": figures["peak_host_bytes"],
        "events_per_s": figures["events"] / seconds if seconds > 0 else 0.0,
    }


def raised_note(result: Result) -> str:
    """Explain why the budget is not the requested one; empty if it is."""
    if result.raised_from is None:
        return ""
    least = result.budget == FLOOR_PAGES * PAGE_BYTES
    return (
        f"a budget of {format_bytes(result.raised_from)} was raised to "
        f"{format_bytes(result.budget)}: "
        + ("the minimum" if least else "1.05 times what the step's largest op needs at once")
    )
