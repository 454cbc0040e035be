"""(c) Not everything fits: umem against what plain torch can do, and against the floor."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from harness import Result, Spread

from gpu import floor, software
from gpu.children import GpuSpec, worker
from gpu.context import Context, measure_each
from gpu.sizing import Sized, short, size
from umem.base.units import format_bytes
from umem.demo.process import WorkerProcess
from umem.errors import UmemError

TECHNIQUES = ("plain", "save_on_cpu", "checkpoint")
TARGET = 1.25  # times the floor, at half of the peak
QUESTION = "how close is umem to the floor, and is it faster than what torch has?"


@dataclass
class Row:
    """One way to train: `fraction` of the peak as budget, None where torch takes what it needs."""

    way: str
    fraction: float | None
    peak_bytes: int | None
    step: Spread | None
    floor_ms: float | None = None
    problem: str | None = None


def run(context: Context) -> None:
    """Fill the record."""
    link = measured_link(context.folder / "micro_bandwidth.json") or _measure_link(context)
    context.record.details["link"] = link
    names = [(f"c {short(name)}", name) for name in context.config.workloads]

    def measure(name: str, context: Context) -> None:
        _Workload(name, context, link).measure()

    measure_each(context, QUESTION, names, measure)


def _measure_link(context: Context) -> dict[str, float]:
    """Without the part that does it: in a process of its own, as this one has no device."""
    folder = context.folder / "link"
    folder.mkdir(exist_ok=True)
    arguments = ["micro_bandwidth", "--folder", str(folder), "--limit", str(context.guard.room)]
    arguments += ["--seconds", "15", *(["--smoke"] if context.config.smoke else [])]
    subprocess.run([sys.executable, "-m", "gpu.part", *arguments], check=True, timeout=60)
    found = measured_link(folder / "micro_bandwidth.json")
    if found is None:
        raise RuntimeError(f"{folder} has no bandwidths: run with --parts a,c")
    return found


def measured_link(path: Path) -> dict[str, float] | None:
    """Return the output of the part `micro_bandwidth`; None without it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["details"]["bandwidth"]
    except (OSError, ValueError, KeyError):
        return None
    return {"in": float(found["in"]), "out": float(found["out"])}


class _Workload:
    def __init__(self, name: str, context: Context, link: dict[str, float]) -> None:
        self._name, self._short, self._link = name, short(name), link
        self._context, self._guard, self._record = context, context.guard, context.record
        self._config, self._deadline, self._cache = context.config, context.deadline, context.cache
        self._rows: list[Row] = []

    def measure(self) -> None:
        sized = size(self._name, self._context)
        spec = GpuSpec(sized.workload, torch_ext_cache=self._cache)
        with worker(self._guard, spec) as plain:
            step = self._techniques(plain)
        self._under_umem(sized, step)
        self._keep(sized)

    def _techniques(self, plain: WorkerProcess) -> floor.Step:
        """Plain torch in its ways; returns the step's trace."""
        for name in TECHNIQUES:
            plain.call("technique", name=name)
            spread = self._steps(plain, self._deadline.left / 10)
            peak = plain.call("peak")["allocated"]
            self._rows.append(Row(name, None, peak, spread))
        plain.call("technique", name="plain")
        assert self._rows[0].step is not None
        return floor.Step.of(plain.call("trace"), self._rows[0].step.median / 1e3)

    def _under_umem(self, sized: Sized, step: floor.Step) -> None:
        found = floor.cuts(step)
        ample = sized.ample(self._guard)
        budgets = {
            fraction: ample if fraction == 1.0 else sized.budget(fraction)
            for fraction in self._config.fractions
        }
        room = self._guard.room
        spec = GpuSpec(sized.workload, budget=ample, torch_ext_cache=self._cache)
        cases = [(f, policy) for f in self._config.fractions for policy in self._config.policies]
        with worker(self._guard, spec) as under:
            for i, (fraction, policy) in enumerate(cases):
                budget = budgets[fraction]
                row = Row(policy, fraction, budget, None)
                capacity = budget if fraction < 1.0 else max(budget, found.peak)
                row.floor_ms = 1e3 * floor.closed_form_floor(
                    step, capacity, self._link["in"], self._link["out"], found
                )
                self._rows.append(row)
                row.problem = self._why_not(policy, fraction)
                if row.problem is not None:
                    continue
                under.call("configure", budget=budget, host_budget=room - budget, policy=policy)
                if policy == "none":
                    under.call("ballast", leave=budget if fraction < 1.0 else 0)
                try:
                    row.step = self._steps(under, self._deadline.left / (len(cases) - i))
                except UmemError as error:
                    row.problem = str(error).splitlines()[-1]
                    return  # the process is gone
                if policy == "none":
                    under.call("ballast", leave=0)

    def _why_not(self, policy: str, fraction: float) -> str | None:
        """Why one case is not measured."""
        if self._deadline.passed:
            return "not measured: the time was used up"
        if policy == "none" and fraction < 1.0 and not self._context.oversubscribe:
            return "not measured: only a full device limits `none` (--allow-oversubscription)"
        return None

    def _steps(self, process: WorkerProcess, seconds: float) -> Spread:
        deadline = self._deadline.within(seconds)
        process.step(self._config.warm_steps)
        return Spread.of([process.step()[0]["ms"] for _ in deadline.rounds(self._config.steps)])

    def _keep(self, sized: Sized) -> None:
        for row in self._rows:
            self._add(row)
        self._record.details.setdefault("outofcore", {})[self._short] = {
            "workload": sized.workload,
            "peak_bytes": sized.peak,
            "rows": [
                {**vars(row), "step": None if row.step is None else vars(row.step)}
                for row in self._rows
            ],
        }
        outcome = software.NOT_COMPARABLE if sized.software else verdict(self._rows)
        self._record.decide(f"c {self._short}", QUESTION, outcome)

    def _add(self, row: Row) -> None:
        label = f"{self._short}, {row.way}"
        if row.fraction is not None:
            label += f" at {row.fraction:g} of the peak"
        if row.step is None:
            self._record.details.setdefault("not_measured", {})[label] = row.problem
            return
        peak = format_bytes(row.peak_bytes or 0)
        self._record.results.append(_result(label, row.step, peak))
        if row.floor_ms:
            spread = row.step
            parts = [value / row.floor_ms for value in (spread.median, spread.low, spread.high)]
            relative = Spread(parts[0], parts[1], parts[2], spread.count)
            wanted = TARGET if (self._short, row.fraction) == ("resnet50", 0.5) else None
            self._record.results.append(_result(f"{label}, to the floor", relative, "", wanted))


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
