"""Runs a workload plain and under umem at several budgets, each in a process of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from umem.base.units import GIB, format_bytes
from umem.errors import StateError, UmemError

from .process import RunSpec, WorkerProcess
from .workloads import WORKLOADS

AMPLE_BYTES = 1 * GIB  # well above every workload's peak; frames are only backed once used
FRACTIONS = (2, 4, 8)
POLICIES = ("none", "lru", "conv_lru", "auto")
PAGE_BYTES = 2 << 20
SAMPLE_MS = 4.0
PLAIN_STEPS = 2  # of plain torch between two runs
TRACE_STEPS = 4  # the last one is shown
WARM_STEPS = 2  # umem observes the first; the optimizer's state is allocated in it


Sample = tuple[float, int, int]  # ms, resident bytes, live bytes


@dataclass(frozen=True)
class DemoPlan:
    """The runs of a demo. `steps` includes the warm-up."""

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    fractions: tuple[int, ...] = FRACTIONS
    policies: tuple[str, ...] = POLICIES
    steps: int = 7
    device: str = "soft"
    torch_ext_cache: str | None = None
    optimizer: str | None = None  # where runs below the peak update; None: as any program
    # A folder for traces: after the runs of a workload, the last fraction's last policy trains once
    # more with a trace. None: no traces.
    traces: str | None = None

    @property
    def runs(self) -> int:
        """Number of processes."""
        return len(self.workloads) * (2 + len(self.fractions) * len(self.policies))


@dataclass(frozen=True)
class DemoRow:
    """Figures of one run; sizes in bytes, `_per_step` and `step_ms` over the steady steps.

    `fraction` is 0 for the plain run and 1 for the one in which everything fits. `plain_ms` is a
    plain step just before and after the run, because machines drift; `ratio` is relative to it.
    Figures that plain torch does not have are None. `problem` says why a run has no figures.
    """

    workload: str
    policy: str
    fraction: int
    peak_bytes: int | None = None
    budget_bytes: int | None = None
    peak_resident_bytes: int | None = None
    identical: bool = False
    faults_per_step: float | None = None
    in_per_step: float | None = None
    out_per_step: float | None = None
    discarded_per_step: float | None = None
    step_ms: float | None = None
    plain_ms: float | None = None
    ratio: float | None = None
    loss: str | None = None
    first_loss: float | None = None
    state_sha256: str | None = None
    problem: str | None = None

    @property
    def within_budget(self) -> bool:
        """True if the max resident bytes stayed in the budget; plain torch has none."""
        if self.budget_bytes is None:
            return True
        return self.peak_resident_bytes is not None and (
            self.peak_resident_bytes <= self.budget_bytes
        )

    @property
    def good(self) -> bool:
        """True if identical to plain torch and within the budget."""
        return self.problem is None and self.identical and self.within_budget


@dataclass
class Measured:
    """The raw outcome of one run."""

    spec: RunSpec
    step_ms: list[float]
    first_loss: float
    fingerprint: dict[str, str]
    warm_stats: dict[str, int]
    steady_stats: dict[str, int]
    stats: dict[str, int]
    samples: list[Sample] = field(default_factory=list)


class Progress(Protocol):
    """Receiver of the demo's progress."""

    def begin(self, title: str, steps: int, budget: int | None = None) -> None:
        """Start a run; `budget` in bytes, None for plain torch."""

    def step(self, done: int, milliseconds: float, resident: Sequence[int] = ()) -> None:
        """Count one more trained step; `resident` has the bytes on the device lately."""

    def end(self, row: DemoRow) -> None:
        """End the run."""

    def note(self, text: str) -> None:
        """Report a message of the run."""


class Worker(Protocol):
    """A started training, such as `process.WorkerProcess`."""

    def __enter__(self) -> Worker: ...

    def __exit__(self, *error: object) -> None: ...

    def step(self, count: int = 1) -> list[dict[str, Any]]: ...

    def stats(self) -> dict[str, int]: ...

    def finish(self) -> dict[str, Any]: ...


Launch = Callable[[RunSpec, Callable[[str], None]], Worker]


def measure(worker: Worker, spec: RunSpec, steps: int, progress: Progress) -> Measured:
    """Train `steps` steps and return the outcome.

    Raises:
        StateError: the worker failed; the message says how.
    """
    records: list[dict[str, Any]] = []
    warm_stats: dict[str, int] = {}
    for done in range(1, steps + 1):
        records += worker.step()
        if done == WARM_STEPS:
            warm_stats = worker.stats()
        progress.step(done, records[-1]["ms"], records[-1].get("resident", ()))
    steady_stats = worker.stats()
    final = worker.finish()
    return Measured(
        spec=spec,
        step_ms=[record["ms"] for record in records],
        first_loss=records[0]["loss"],
        fingerprint=final["fingerprint"],
        warm_stats=warm_stats,
        steady_stats=steady_stats,
        stats=final["stats"],
        samples=[(ms, resident, live) for ms, resident, live in final["samples"]],
    )


@dataclass
class DemoOutcome:
    """All runs of a demo, and the samples of each by workload, fraction and policy."""

    plan: DemoPlan
    rows: list[DemoRow] = field(default_factory=list)
    samples: dict[tuple[str, int, str], list[Sample]] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """True if every run was identical and within its budget."""
        return bool(self.rows) and all(row.good for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome for JSON."""
        rows = [
            {**asdict(row), "within_budget": row.within_budget, "good": row.good}
            for row in self.rows
        ]
        plan = {key: value for key, value in asdict(self.plan).items() if key != "traces"}
        return {"good": self.good, "plan": plan, "rows": rows}


def run(plan: DemoPlan, progress: Progress, launch: Launch = WorkerProcess) -> DemoOutcome:
    """Run everything in `plan`; a failed run under a budget becomes a row with a problem.

    Raises:
        StateError: a plain run or one with an ample budget failed; without these there is nothing
        to
            compare with.
    """
    outcome = DemoOutcome(plan)
    for name in plan.workloads:
        for row, samples in _run_workload(name, plan, progress, launch):
            outcome.rows.append(row)
            outcome.samples[row.workload, row.fraction, row.policy] = samples
            progress.end(row)
    return outcome


def _run_workload(
    name: str, plan: DemoPlan, progress: Progress, launch: Launch
) -> Iterator[tuple[DemoRow, list[Sample]]]:
    fused = plan.optimizer is not None
    base = RunSpec(name, torch_ext_cache=plan.torch_ext_cache, fused=fused)
    progress.begin(f"{name}: plain torch", plan.steps)
    with launch(base, progress.note) as reference:
        plain = measure(reference, base, plan.steps, progress)
        yield make_row(plain, plain, plain.step_ms[WARM_STEPS:], 0, None), []
        beside = _Beside(reference, plain, plan, progress, launch)

        roomy = replace(base, device=plan.device, budget=AMPLE_BYTES, sample_ms=SAMPLE_MS)
        row, measured = beside.run(roomy, 1, None)
        if measured.stats["bytes_out"]:
            raise StateError(
                f"{name} moved bytes within {format_bytes(AMPLE_BYTES)}: its peak is unknown"
            )
        peak = measured.stats["peak_live_bytes"]
        yield replace(row, peak_bytes=peak), measured.samples
        spec = roomy

        for fraction in plan.fractions:
            budget = peak // fraction // PAGE_BYTES * PAGE_BYTES
            for policy in plan.policies:
                where = plan.optimizer or roomy.optimizer
                spec = replace(roomy, budget=budget, policy=policy, optimizer=where)
                try:
                    row, measured = beside.run(spec, fraction, peak)
                except UmemError as error:
                    yield DemoRow(name, policy, fraction, peak, budget, problem=str(error)), []
                else:
                    yield row, measured.samples
        if plan.traces is not None:
            _record(replace(spec, trace=trace_of(plan, name), sample_ms=0.0), progress, launch)


def trace_of(plan: DemoPlan, workload: str) -> str:
    """Return the file of a workload's trace."""
    assert plan.traces is not None, "the demo has a folder for traces"
    return str(Path(plan.traces, f"{workload}.jsonl.gz"))


def _record(spec: RunSpec, progress: Progress, launch: Launch) -> None:
    """Train with a trace, which would slow down a run that is measured."""
    progress.note(f"{spec.workload}: {spec.policy}, once more with a trace for the report")
    try:
        with launch(spec, progress.note) as worker:
            worker.step(TRACE_STEPS)
            worker.finish()
    except UmemError as error:
        progress.note(f"no trace: {error}")


class _Beside:
    """Runs with plain steps before and after each, because machines drift."""

    def __init__(
        self, reference: Worker, plain: Measured, plan: DemoPlan, progress: Progress, launch: Launch
    ) -> None:
        self._reference = reference
        self._plain = plain
        self._plan = plan
        self._progress = progress
        self._launch = launch
        self._before = plain.step_ms[-PLAIN_STEPS:]

    def run(self, spec: RunSpec, fraction: int, peak: int | None) -> tuple[DemoRow, Measured]:
        """Measure `spec`; raise StateError if it fails."""
        memory = "everything fits" if fraction == 1 else f"1/{fraction} of the peak"
        title = f"{spec.workload}: {spec.policy}, {memory}"
        self._progress.begin(title, self._plan.steps, spec.budget)
        with self._launch(spec, self._progress.note) as worker:
            measured = measure(worker, spec, self._plan.steps, self._progress)
        after = [record["ms"] for record in self._reference.step(PLAIN_STEPS)]
        row = make_row(measured, self._plain, self._before + after, fraction, peak)
        self._before = after
        return row, measured


def make_row(
    measured: Measured, plain: Measured, plain_ms: Sequence[float], fraction: int, peak: int | None
) -> DemoRow:
    """Return the figures of a run; `plain_ms` are the times of plain torch's steps around it."""
    spec = measured.spec
    steady = measured.step_ms[WARM_STEPS:]
    step_ms = statistics.median(steady)
    row = DemoRow(
        workload=spec.workload,
        policy="plain torch" if spec.budget is None else spec.policy,
        fraction=fraction,
        peak_bytes=peak,
        budget_bytes=spec.budget,
        identical=measured.fingerprint == plain.fingerprint,
        step_ms=step_ms,
        plain_ms=statistics.median(plain_ms),
        ratio=step_ms / statistics.median(plain_ms),
        loss=measured.fingerprint["loss"],
        first_loss=measured.first_loss,
        state_sha256=measured.fingerprint["state_sha256"],
    )
    if spec.budget is None:
        return row

    def each(key: str) -> float:
        return (measured.steady_stats[key] - measured.warm_stats[key]) / len(steady)

    return replace(
        row,
        peak_resident_bytes=measured.stats["peak_resident_bytes"],
        faults_per_step=each("faults"),
        in_per_step=each("bytes_in"),
        out_per_step=each("bytes_out"),
        discarded_per_step=each("bytes_discarded"),
    )
