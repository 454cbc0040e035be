"""(g) Where the optimizer updates: shares on the host, and other optimizers on the processor."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from gpu import sizing, software
from gpu.children import GpuSpec
from gpu.context import Context
from gpu.device import whole_pages
from gpu.record import Item, take
from gpu.sizing import short, smallest
from umem.demo.process import WorkerProcess
from umem.errors import StateError

WORKLOAD = "gpt2"  # with AdamW, whose state is twice the weights
FRACTIONS = (0.5, 1 / 3)  # of the peak, as budgets
PLAIN, TORCHAO = "plain", "torchao CPUOffloadOptimizer"
QUESTION = "which share of the updates is best on the host, and what do others take?"


@dataclass(frozen=True)
class Way:
    """Arguments of `umem.page_optimizer`; None: the optimizer is left as it is."""

    name: str
    update: str | None = None
    share: float | None = None
    overlap: bool = False
    release: bool = False


WAYS = (
    Way("device"),
    Way("host 25 %", "host", 0.25),
    Way("host 50 %", "host", 0.5),
    Way("host 75 %", "host", 0.75),
    Way("host", "host"),
    Way("host, overlap", "host", overlap=True),
    Way("host, gradients released", "host", release=True),
    Way("auto", "auto"),
)


def run(context: Context) -> None:
    """Fill the record: one process of plain torch, and one under umem."""
    bench = _HostShare(context)
    items = [Item("g torch", QUESTION, bench.others), Item("g umem", QUESTION, bench.shares)]
    take(context.record, items, context.deadline)


class _HostShare:
    def __init__(self, context: Context) -> None:
        self._context, self._config = context, context.config
        self._room = context.guard.room
        sizes = sizing.known(context)
        self._sized = next(s for s in sizes.values() if short(s.workload) == WORKLOAD)
        self._medians: dict[str, float] = {}

    def others(self) -> None:
        """Train with plain torch, which takes what it needs, and with torchao's optimizer."""
        start = smallest(self._config.workloads[0])
        with self._context.worker(GpuSpec(start, deterministic=False)) as process:
            self._rebuild(process)
            self._steps(process, PLAIN, self._config.warm_steps)
            if importlib.util.find_spec("torchao") is None:
                self._context.record.leave_out(f"{WORKLOAD}, {TORCHAO}", "it is not installed")
                return
            process.call("torchao")
            self._steps(process, TORCHAO, self._config.warm_steps)

    def shares(self) -> None:
        """Train under umem with each share at each budget."""
        start = smallest(self._config.workloads[0])
        budget = whole_pages(self._room / 2)
        with self._context.worker(GpuSpec(start, deterministic=False, budget=budget)) as process:
            cases = [(fraction, way) for fraction in FRACTIONS for way in WAYS]
            for i, (fraction, way) in enumerate(cases):
                label = f"{way.name} at {fraction:.2g} of the peak"
                if self._context.deadline.passed:
                    self._context.record.leave_out(f"{WORKLOAD}, {label}", "the time was used up")
                    continue
                budget = self._sized.budget(fraction)
                process.call("configure", budget=budget, host_budget=self._room - budget)
                self._rebuild(process)
                try:
                    process.call(
                        "optimizer", update=way.update, share=way.share, overlap=way.overlap,
                        release=way.release,
                    )  # fmt: skip
                except StateError as error:  # such as a host budget that is too small
                    self._context.record.leave_out(f"{WORKLOAD}, {label}", str(error))
                    continue
                self._steps(process, label, self._config.planning_steps, 1 / (len(cases) - i))
        self._decide()

    def _rebuild(self, process: WorkerProcess) -> None:
        answer = process.call("rebuild", workload=self._sized.workload, steps=1)
        if not answer["fits"]:
            raise RuntimeError(answer["reason"])

    def _steps(self, process: WorkerProcess, label: str, warm: int, share: float = 0.5) -> None:
        deadline = self._context.deadline
        process.step(warm)
        left = deadline.within(deadline.left * share)
        times = [process.step()[0]["ms"] for _ in left.rounds(self._config.steps)]
        spread = self._context.record.add(f"{WORKLOAD}, {label}", times, "ms")
        self._medians[label] = spread.median

    def _decide(self) -> None:
        if software.asked_for():
            outcome = software.NOT_COMPARABLE
        else:
            plain = self._medians.get(PLAIN)
            found = {label: ms for label, ms in self._medians.items() if label != PLAIN}
            best = min(found, key=lambda label: found[label]) if found else "nothing"
            ratio = f", {found[best] / plain:.2f}x of plain torch" if plain and found else ""
            outcome = f"{best}{ratio}"
        self._context.record.decide("g", QUESTION, outcome)
