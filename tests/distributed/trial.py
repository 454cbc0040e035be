"""One run of a program: its ranks are forked from a process that has torch loaded."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch._dynamo  # once, and not in each child: optimizers import it
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from . import model
from .compositions import TRIALS
from .programs import Trial

STEPS = 12
FIRST = 5  # the first iteration of which figures count: a plan was recorded, and is followed
SETTLED = 10  # and the first by which the plan and its spare one were tried, and one was taken
_TIMEOUT = timedelta(seconds=120)
_COUNTERS = (
    "bytes_in", "bytes_out", "faults", "ops_above_budget", "plan_hits", "plan_misses", "steps",
)  # fmt: skip


@dataclass
class Rank:
    """The results of one rank."""

    weights: str = ""  # sha256 of the final values
    losses: list[str] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # by iteration, of all threads
    counters: list[dict[str, int]] = field(default_factory=list)  # by iteration
    complete: list[int] = field(default_factory=list)  # the plan that each iteration followed
    plans: int = 0  # made in all
    peak_live_bytes: int = 0  # since `FIRST`: building the program may have needed more
    peak_resident_bytes: int = 0  # always
    # Per step, in and both ways; 0 if none was recorded, or an op needs more than the budget.
    bound_bytes_in: int = 0
    bound_bytes_moved: int = 0
    error: str = ""


@dataclass
class Result:
    """A run's figures: sums over ranks and over `FIRST` and later iterations, except `cpu_s`."""

    trial: str
    budget: str
    policy: str
    ranks: list[Rank]

    @property
    def error(self) -> str:
        return next((rank.error for rank in self.ranks if rank.error), "")

    @property
    def bits(self) -> list[tuple[str, list[str]]]:
        """Return the values that must equal those of the plain run."""
        return [(rank.weights, rank.losses) for rank in self.ranks]

    @property
    def cpu_s(self) -> float:
        """The CPU time of an iteration: the median, of the slowest rank."""
        return max((median(rank.cpu_s[FIRST:]) for rank in self.ranks if rank.cpu_s), default=0.0)

    @property
    def peak_live_bytes(self) -> int:
        return max((rank.peak_live_bytes for rank in self.ranks), default=0)

    def total(self, counter: str, *, first: int = FIRST) -> int:
        """Return the sum of a counter over ranks and iterations."""
        return sum(row[counter] for rank in self.ranks for row in rank.counters[first:])

    def each(self, counter: str, *, first: int = FIRST) -> float:
        """Return a counter's mean per rank and iteration."""
        count = sum(len(rank.counters[first:]) for rank in self.ranks)
        return self.total(counter, first=first) / count if count else 0.0

    @property
    def over_bound(self) -> tuple[float, float] | None:
        """Bytes in, and both ways, of settled steps over their bounds; None without bounds."""
        least_in = sum(rank.bound_bytes_in for rank in self.ranks)
        least = sum(rank.bound_bytes_moved for rank in self.ranks)
        if not all(rank.bound_bytes_in for rank in self.ranks):
            return None
        back = self.each("bytes_in", first=SETTLED) * len(self.ranks)
        out = self.each("bytes_out", first=SETTLED) * len(self.ranks)
        return back / least_in, (back + out) / least

    @property
    def peak_resident_bytes(self) -> int:
        return max((rank.peak_resident_bytes for rank in self.ranks), default=0)

    @property
    def hit_share(self) -> float | None:
        """Share of the ops that followed a plan; None where no plan could be followed."""
        return self.hit_share_from(FIRST)

    def hit_share_from(self, first: int) -> float | None:
        """Return that share of the iterations from another one on."""
        hits, misses = (self.total(name, first=first) for name in ("plan_hits", "plan_misses"))
        return hits / (hits + misses) if hits + misses else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Course(NamedTuple):
    """How a run goes."""

    steps: int = STEPS
    batch: int = model.BATCH
    length: int = model.LENGTH
    says_steps: bool = False  # by `umem.step()`, for programs of which umem can only guess them
    bounds: bool = False  # each rank bounds the bytes of its planned step, by `support.bounds_lp`


def run(
    name: str,
    budget: str,
    policy: str = "auto",
    *,
    bytes_of_budget: int = 0,
    course: Course = Course(),  # noqa: B008  (immutable)
    **options: Any,
) -> Result:
    """Run a trial's program on its ranks.

    Args:
        name: of the trial.
        budget: how it is called; "plain" runs without umem.
        policy: of umem.
        bytes_of_budget: each rank's.
        course: how it goes.
        options: other options of `umem.enable`.
    """
    trial = TRIALS[name]
    for module in trial.needs:
        importlib.import_module(module)  # once, and not in each child
    enable = {"device": "soft", "budget": bytes_of_budget, "policy": policy} | options
    with tempfile.TemporaryDirectory() as folder:
        children = [
            _fork(trial, rank, Path(folder), None if budget == "plain" else enable, course)
            for rank in range(trial.ranks)
        ]
        for child in children:
            os.waitpid(child, 0)
        ranks = [_read(Path(folder) / f"{rank}.json") for rank in range(trial.ranks)]
    return Result(name, budget, policy, ranks)


def _read(path: Path) -> Rank:
    if not path.exists():
        return Rank(error="the process ended without a result")
    return Rank(**json.loads(path.read_text()))


def _fork(
    trial: Trial, rank: int, folder: Path, enable: dict[str, Any] | None, course: Course
) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    result = Rank()
    try:
        _work(trial, rank, folder, enable, course, result)
        if course.bounds and enable is not None:
            result.bound_bytes_in, result.bound_bytes_moved = _bounds()
    except BaseException:  # noqa: BLE001  (a rank that fails is a result)
        result.error = traceback.format_exc()
    (folder / f"{rank}.part").write_text(json.dumps(asdict(result)))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    os._exit(0)  # whatever threads the program has left


def _work(
    trial: Trial,
    rank: int,
    folder: Path,
    enable: dict[str, Any] | None,
    course: Course,
    result: Rank,
) -> None:
    torch.set_num_threads(1)
    model.BATCH, model.LENGTH = course.batch, course.length  # of this process: one program
    if enable is not None:
        import umem

        umem.enable(**enable)
    if trial.ranks > 1:
        store = FileStore(str(folder / "store"), trial.ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=trial.ranks, timeout=_TIMEOUT
        )
    program = trial.make(rank, trial.ranks)
    for i in range(course.steps):
        if enable is not None and i == FIRST:
            result.peak_resident_bytes = umem.stats().peak_resident_bytes
            umem.reset_peak_stats()
        before, began = _counters(enable), time.process_time()
        losses = program.step(i)
        if enable is not None and course.says_steps:
            umem.step()
        result.cpu_s.append(time.process_time() - began)
        after = _counters(enable)
        result.counters.append({name: after[name] - before[name] for name in after})
        result.losses.extend(float(loss).hex() for loss in losses)
        if enable is not None:
            _follow(result)
    digest = hashlib.sha256()
    for tensor in program.state():
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    result.weights = digest.hexdigest()
    if enable is not None:
        stats = umem.stats()
        result.peak_live_bytes = stats.peak_live_bytes
        result.peak_resident_bytes = max(result.peak_resident_bytes, stats.peak_resident_bytes)
    if trial.ranks > 1:
        dist.barrier()


def _counters(enable: dict[str, Any] | None) -> dict[str, int]:
    if enable is None:
        return {}
    import umem

    stats = umem.stats()
    return {name: getattr(stats, name) for name in _COUNTERS}


def _follow(result: Rank) -> None:
    from umem.base.native import core

    if core.current_options().policy != "planned":
        return
    status = core.plan_status()
    result.complete.append(status["complete"])
    result.plans = max([result.plans, *status["plans"]])


def _bounds() -> tuple[int, int]:
    """Return bounds of the bytes of the planned step, in and both ways; 0 where there are none."""
    from support.bounds_lp import lp_bytes_in, lp_bytes_moved

    from umem.errors import PlanError
    from umem.session.session import planned_step

    planned = planned_step()
    if planned is None:
        return 0, 0
    step, budget = planned.in_segments, planned.budget
    try:
        return lp_bytes_in(step, budget), lp_bytes_moved(step, budget)
    except PlanError:  # no schedule exists at this budget, or there is no solution in time
        return 0, 0
