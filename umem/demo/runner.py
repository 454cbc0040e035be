"""Runs a workload plain and under umem at several budgets, each in a process of its own."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from umem.base.progress import Advance, ignore
from umem.base.units import GIB, PAGE_BYTES, format_bytes
from umem.errors import StateError, UmemError

from .process import RunSpec, WorkerProcess
from .workloads import WORKLOADS

AMPLE_BYTES = 1 * GIB  # well above every workload's peak; frames are only backed once used
FRACTIONS = (2, 4, 8)
POLICIES = ("none", "lru", "conv_lru", "auto")
SAMPLE_MS = 4.0
PLAIN_STEPS = 2  # of plain torch between two runs
TRACE_STEPS = 4  # the last one is shown
WARM_STEPS = 2  # umem observes the first; the optimizer's state is allocated in it
_PER_STEP = {
    "faults_per_step": "faults",
    "in_per_step": "bytes_in",
    "out_per_step": "bytes_out",
    "discarded_per_step": "bytes_discarded",
}

Tell = Callable[[str], None]
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
    disk: str | None = None  # a folder for evicted memory of these runs

    @property
    def runs(self) -> int:
        """Number of runs."""
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
    samples: Sequence[Sample] = ()

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

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        figures = {key: value for key, value in asdict(self).items() if key != "samples"}
        return {**figures, "within_budget": self.within_budget, "good": self.good}


def run(
    plan: DemoPlan, tell: Tell, advance: Advance = ignore, traces: Path | None = None
) -> Iterator[DemoRow]:
    """Run everything in `plan`; a failed run under a budget becomes a row with a problem.

    Args:
        plan: the runs.
        tell: is called with each line that a run says.
        advance: is called with 1 for each step.
        traces: a folder; the last run of each workload trains once more, and is traced there.

    Raises:
        StateError: a plain run or one with an ample budget failed; without these there is nothing
            to compare with.
    """
    for name in plan.workloads:
        base = RunSpec(
            name,
            device=plan.device,
            torch_ext_cache=plan.torch_ext_cache,
            fused=plan.optimizer is not None,
        )
        with WorkerProcess(base, tell) as reference:
            yield from _Workload(plan, base, reference, tell, advance).rows(traces)


class _Measured(NamedTuple):
    """The outcome of a run."""

    step_ms: list[float]
    first_loss: float
    per_step: dict[str, Any]
    final: dict[str, Any]


class _Workload:
    """The runs of a workload, with plain steps before and after each, because machines drift."""

    def __init__(
        self, plan: DemoPlan, base: RunSpec, reference: WorkerProcess, tell: Tell, advance: Advance
    ) -> None:
        self._plan, self._base, self._reference = plan, base, reference
        self._tell, self._advance = tell, advance
        self._plain = self._measure(reference)
        self._before = self._plain.step_ms[WARM_STEPS:]

    def rows(self, traces: Path | None) -> Iterator[DemoRow]:
        plan, name = self._plan, self._base.workload
        yield self._row(self._base, 0, self._plain, self._before)
        spec = replace(self._base, budget=AMPLE_BYTES, sample_ms=SAMPLE_MS)
        roomy = self._run(spec, 1)
        assert roomy.peak_bytes is not None, "a run under umem has a peak"
        yield roomy
        for fraction, policy in itertools.product(plan.fractions, plan.policies):
            budget = roomy.peak_bytes // fraction // PAGE_BYTES * PAGE_BYTES
            where = plan.optimizer or spec.optimizer
            spec = replace(spec, budget=budget, policy=policy, optimizer=where, disk=plan.disk)
            try:
                row = self._run(spec, fraction)
            except UmemError as error:
                row = DemoRow(name, policy, fraction, budget_bytes=budget, problem=str(error))
            yield replace(row, peak_bytes=roomy.peak_bytes)
        if traces is not None:
            self._trace(replace(spec, trace=str(trace_of(traces, name)), sample_ms=0.0))

    def _run(self, spec: RunSpec, fraction: int) -> DemoRow:
        with WorkerProcess(spec, self._tell) as worker:
            measured = self._measure(worker)
        if fraction == 1 and measured.final["stats"]["bytes_out"]:
            raise StateError(
                f"{spec.workload} moved bytes within {format_bytes(AMPLE_BYTES)}: its peak is "
                "unknown"
            )
        after = [record["ms"] for record in self._reference.step(PLAIN_STEPS)]
        row = self._row(spec, fraction, measured, self._before[-PLAIN_STEPS:] + after)
        self._before = after
        return row

    def _measure(self, worker: WorkerProcess) -> _Measured:
        records: list[dict[str, Any]] = []
        warm: dict[str, int] = {}
        for done in range(1, self._plan.steps + 1):
            records += worker.step()
            if done == WARM_STEPS:
                warm = worker.stats()
            self._advance(1)
        steady, count = worker.stats(), self._plan.steps - WARM_STEPS
        per_step = {
            name: (steady[key] - warm[key]) / count for name, key in _PER_STEP.items() if warm
        }
        times = [record["ms"] for record in records]
        return _Measured(times, records[0]["loss"], per_step, worker.finish())

    def _row(
        self, spec: RunSpec, fraction: int, measured: _Measured, plain_ms: Sequence[float]
    ) -> DemoRow:
        """Return the figures of a run; `plain_ms` are the plain steps' around it."""
        step_ms, plain = (
            statistics.median(measured.step_ms[WARM_STEPS:]),
            statistics.median(plain_ms),
        )
        stats, fingerprint = measured.final["stats"], measured.final["fingerprint"]
        return DemoRow(
            workload=spec.workload,
            policy="plain torch" if spec.budget is None else spec.policy,
            fraction=fraction,
            peak_bytes=stats.get("peak_live_bytes"),
            budget_bytes=spec.budget,
            peak_resident_bytes=stats.get("peak_resident_bytes"),
            identical=fingerprint == self._plain.final["fingerprint"],
            step_ms=step_ms,
            plain_ms=plain,
            ratio=step_ms / plain,
            first_loss=measured.first_loss,
            samples=measured.final["samples"],
            **fingerprint,
            **measured.per_step,
        )

    def _trace(self, spec: RunSpec) -> None:
        """Train with a trace, which would slow down a run that is measured."""
        self._tell(f"{spec.workload}: {spec.policy}, once more with a trace for the report")
        try:
            with WorkerProcess(spec, self._tell) as worker:
                worker.step(TRACE_STEPS)
                worker.finish()
        except UmemError as error:
            self._tell(f"no trace: {error}")


def trace_of(traces: Path, workload: str) -> Path:
    """Return the file of a workload's trace."""
    return traces / f"{workload}.jsonl.gz"
