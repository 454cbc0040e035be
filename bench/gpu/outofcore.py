"""(d) Not everything fits: umem against what plain torch can do, and against the floor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from harness import Result, Spread

from gpu import floor, sizing, software
from gpu.children import GpuSpec
from gpu.context import Context, measure_each
from gpu.deadline import Deadline
from gpu.device import whole_pages
from gpu.record import TIME_USED_UP, Record, load
from gpu.sizing import Sized, short, smallest
from umem.base.units import format_bytes
from umem.demo.process import WorkerProcess
from umem.policies import registry

PLAIN = "plain"
TECHNIQUES = (PLAIN, "save_on_cpu", "checkpoint")
DRIVERS_OWN = "none"  # the policy that leaves eviction to the driver
TARGET = 1.25  # times the floor, at half of the peak
QUESTION = "how close is umem to the floor, and is it faster than what torch has?"


@dataclass
class Row:
    """One way to train: `fraction` of the peak as budget, None where torch takes what it needs.

    A step moves `bytes_in` and `bytes_out`; `planned` is the share of its ops that went by a plan.
    """

    way: str
    fraction: float | None
    peak_bytes: int
    step: Spread | None
    floor_ms: float | None = None
    problem: str | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    planned: float = 0.0

    def count(self, before: dict[str, int], after: dict[str, int]) -> None:
        """Take what its steps did from umem's statistics."""
        assert self.step is not None
        done = {name: after[name] - before[name] for name in after}
        self.bytes_in = done["bytes_in"] // self.step.count
        self.bytes_out = done["bytes_out"] // self.step.count
        ops = done["plan_hits"] + done["plan_misses"]
        self.planned = done["plan_hits"] / ops if ops else 0.0

    @property
    def note(self) -> str:
        """What the step time rests on."""
        words = [format_bytes(self.peak_bytes)]
        if self.bytes_in or self.bytes_out:
            moved = f"{format_bytes(self.bytes_in)} in, {format_bytes(self.bytes_out)} out"
            words.append(f"{moved} a step")
        if self.planned:
            words.append(f"{self.planned:.0%} of the ops by a plan")
        return ", ".join(words)


@dataclass
class Training:
    """A workload, its rows so far, and its step in plain torch, whose `cuts` the floor uses."""

    sized: Sized
    rows: list[Row] = field(default_factory=list)
    step: floor.Step | None = None
    cuts: floor.Cuts | None = None

    @property
    def short(self) -> str:
        """The workload's name without its settings."""
        return short(self.sized.workload)


def run(context: Context) -> None:
    """Fill the record. Plain torch and each policy have a process, which trains all workloads."""
    trainings = [Training(sized) for sized in sizing.known(context).values()]
    bench = _OutOfCore(context, measured_link(context))
    context.record.details["link"] = bench.link
    stages = [PLAIN, *context.config.policies]
    for i, stage in enumerate(stages):
        with context.worker(bench.spec(stage)) as process:
            share = context.share(1 / (len(stages) - i))

            def measure(
                training: Training,
                context: Context,
                stage: str = stage,
                process: WorkerProcess = process,
            ) -> None:
                way = bench.plain if stage == PLAIN else bench.policy
                for row in way(stage, training, process, context.deadline):
                    _keep(row, training, context.record)

            subjects = [(f"d {each.short}, {stage}", each) for each in trainings]
            measure_each(share, QUESTION, subjects, measure)
    for training in trainings:
        outcome = software.NOT_COMPARABLE if training.sized.software else verdict(training.rows)
        context.record.decide(f"d {training.short}", QUESTION, outcome)


def measured_link(context: Context) -> dict[str, float]:
    """Return the bytes a second of both directions, from the part `micro_bandwidth`.

    Raises:
        RuntimeError: it has not measured them.
    """
    record = load(context.folder / "micro_bandwidth.json")
    found: dict[str, Any] = {} if record is None else record.details.get("bandwidth", {})
    if set(found) != {"in", "out"}:
        raise RuntimeError("the part micro_bandwidth has no bandwidths of this link")
    return {way: float(found[way]) for way in ("in", "out")}


class _OutOfCore:
    def __init__(self, context: Context, link: dict[str, float]) -> None:
        self.link = link
        self._config, self._oversubscribe = context.config, context.oversubscribe
        self._room = context.guard.room

    def spec(self, stage: str) -> GpuSpec:
        """Return what the process of plain torch, or of a policy, starts with."""
        start = smallest(self._config.workloads[0])
        if stage == PLAIN:
            return GpuSpec(start)
        return GpuSpec(start, policy=stage, budget=whole_pages(self._room / 2))

    def plain(
        self, _: str, training: Training, process: WorkerProcess, deadline: Deadline
    ) -> Iterator[Row]:
        """Train in the ways of plain torch, and record the step for the floor."""
        _rebuild(process, training.sized)
        for i, way in enumerate(TECHNIQUES):
            process.call("technique", name=way)
            process.step(self._config.warm_steps)
            left = deadline.within(deadline.left / (len(TECHNIQUES) + 1 - i))  # 1: the trace
            spread = self._steps(process, left)
            yield Row(way, None, process.call("peak")["allocated"], spread)
        process.call("technique", name=PLAIN)
        plain = training.rows[0].step
        assert plain is not None
        training.step = floor.Step.of(process.call("trace"), plain.median / 1e3)
        training.cuts = floor.cuts(training.step)

    def policy(
        self, policy: str, training: Training, process: WorkerProcess, deadline: Deadline
    ) -> Iterator[Row]:
        """Train at each budget under one policy."""
        rows = [self._row(policy, fraction, training) for fraction in self._config.fractions]
        planned = policy == registry.DEFAULT
        warm_steps = self._config.planning_steps if planned else self._config.warm_steps
        full = policy == DRIVERS_OWN and self._oversubscribe
        self._configure(process, training.sized.ample(self._room))  # not the last one's budget
        _rebuild(process, training.sized)
        for i, row in enumerate(rows):
            if row.problem is None and deadline.passed:
                row.problem = TIME_USED_UP
            if row.problem is None:
                self._configure(process, row.peak_bytes)
                if full:
                    process.call("ballast", leave=0 if row.fraction == 1.0 else row.peak_bytes)
                process.step(warm_steps)
                left = deadline.within(deadline.left / (len(rows) - i))
                before = process.stats()
                row.step = self._steps(process, left)
                row.count(before, process.stats())
            yield row
        if full:
            process.call("ballast", leave=0)

    def _row(self, policy: str, fraction: float, training: Training) -> Row:
        """Return the row of a case that is to be measured, or its problem."""
        if training.step is None or training.cuts is None:
            raise RuntimeError("plain torch did not train it")
        sized = training.sized
        budget = sized.ample(self._room) if fraction == 1.0 else sized.budget(fraction)
        capacity = budget if fraction < 1.0 else max(budget, training.cuts.peak)
        lowest = floor.closed_form_floor(
            training.step, capacity, self.link["in"], self.link["out"], training.cuts
        )
        row = Row(policy, fraction, budget, None, 1e3 * lowest)
        if policy == DRIVERS_OWN and fraction < 1.0 and not self._oversubscribe:
            row.problem = "only a full device limits `none` (--allow-oversubscription)"
        return row

    def _configure(self, process: WorkerProcess, budget: int) -> None:
        process.call("configure", budget=budget, host_budget=self._room - budget)

    def _steps(self, process: WorkerProcess, deadline: Deadline) -> Spread:
        return Spread.of([process.step()[0]["ms"] for _ in deadline.rounds(self._config.steps)])


def _rebuild(process: WorkerProcess, sized: Sized) -> None:
    answer = process.call("rebuild", workload=sized.workload, steps=1)
    if not answer["fits"]:
        raise RuntimeError(answer["reason"])


def _keep(row: Row, training: Training, record: Record) -> None:
    """Write down a row: each may be the last one that there is time for."""
    training.rows.append(row)
    _add(row, training.short, record)
    record.details.setdefault("outofcore", {})[training.short] = {
        "workload": training.sized.workload,
        "peak_bytes": training.sized.peak,
        "rows": [
            {**vars(row), "step": None if row.step is None else vars(row.step)}
            for row in training.rows
        ],
    }
    record.save()


def _add(row: Row, name: str, record: Record) -> None:
    label = f"{name}, {row.way}"
    if row.fraction is not None:
        label += f" at {row.fraction:g} of the peak"
    if row.step is None:
        record.leave_out(label, row.problem or TIME_USED_UP)
        return
    record.results.append(_result(label, row.step, row.note))
    if row.floor_ms:
        spread = row.step
        parts = [value / row.floor_ms for value in (spread.median, spread.low, spread.high)]
        relative = Spread(parts[0], parts[1], parts[2], spread.count)
        wanted = TARGET if (name, row.fraction) == ("resnet50", 0.5) else None
        record.results.append(_result(f"{label}, to the floor", relative, "", wanted))


def _result(label: str, spread: Spread, note: str, target: float | None = None) -> Result:
    unit = "x" if label.endswith("to the floor") else "ms"
    return Result(label, spread, unit, target, note)


def verdict(rows: list[Row]) -> str:
    """Describe the best policy at each budget against the lower bound and torch's techniques."""
    others = {row.way: row.step.median for row in rows if row.fraction is None and row.step}
    words = []
    for fraction in sorted(
        {row.fraction for row in rows if row.fraction is not None}, reverse=True
    ):
        measured = [
            (row.step.median, row.floor_ms, row.way)
            for row in rows
            if row.fraction == fraction and row.step and row.floor_ms
        ]
        if not measured:
            words.append(f"{fraction:g}: not measured")
            continue
        took, floor_ms, way = min(measured)
        beside = ", ".join(
            f"{took / others[way]:.2f}x {way}" for way in TECHNIQUES if way in others
        )
        words.append(f"{fraction:g}: {way} takes {took / floor_ms:.2f}x the floor, {beside}")
    return "; ".join(words)
