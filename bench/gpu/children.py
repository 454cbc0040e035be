"""The trainings that parts compare, each in a process of its own, and never without the guard."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu.guard import Guard
from umem.base.units import MIB, PAGE_BYTES
from umem.config import settings
from umem.demo.process import RunSpec, WorkerProcess
from umem.policies import registry

BENCH = Path(__file__).resolve().parents[1]
SMALLEST = 32 * MIB  # budget: below it, one operator may not fit


@dataclass(frozen=True)
class GpuSpec(RunSpec):
    """A training on the GPU; with a `budget` under umem, which starts as in any program."""

    policy: str = registry.DEFAULT
    device: str = "cuda"
    threads: int = 4


def environment(budget: int, host_budget: int, cache: str | None) -> dict[str, str]:
    """Return the environment of every child: the guard is on, and both budgets are always set."""
    kept = {"UMEM_TORCH_EXT_CACHE": cache} if cache else {}
    return {
        **settings.child_environment(),
        **kept,
        "PYTHONPATH": python_path(),
        "UMEM_GUARD": "1",
        "UMEM_BUDGET": str(budget),
        "UMEM_HOST_BUDGET": str(host_budget),
    }


def python_path() -> str:
    """Return a PYTHONPATH with this package, before the entries of the parent's."""
    given = os.environ.get("PYTHONPATH")
    return str(BENCH) if not given else f"{BENCH}{os.pathsep}{given}"


@contextlib.contextmanager
def worker(guard: Guard, spec: GpuSpec, timeout: float = 120.0) -> Iterator[WorkerProcess]:
    """Start a training. Under umem it holds all that the guard has left until it ends.

    Raises:
        GuardError: the budget is beyond the limit.
        StateError: it does not start.
    """
    with contextlib.ExitStack() as stack:
        budget, room = spec.budget or PAGE_BYTES, 2 * PAGE_BYTES
        if spec.budget is not None:
            room = max(guard.room, budget + PAGE_BYTES)
            stack.enter_context(guard.share(room, f"{spec.workload} under umem"))
        variables = environment(budget, room - budget, spec.torch_ext_cache)
        process = WorkerProcess(
            spec,
            on_note=lambda text: print(text, file=sys.stderr, flush=True),
            timeout=timeout,
            command=[sys.executable, "-W", "ignore", "-m", "gpu.worker", "--serve"],
            environment=variables,
        )
        yield stack.enter_context(process)
