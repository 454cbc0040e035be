"""Sizes of the workloads that can run under the guard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from gpu import workloads
from gpu.children import SMALLEST, GpuSpec
from gpu.context import Context, measure_each
from gpu.guard import Guard, GuardError
from gpu.record import load
from gpu.software import is_software
from umem.base.units import PAGE_BYTES, format_bytes
from umem.demo.process import WorkerProcess

SHARE = 0.8  # of the guard's room that a peak may take: umem rounds blocks up
TRIES = 4
QUESTION = "how large may it be under the guard?"


@dataclass(frozen=True)
class Sized:
    """A workload whose peak, in bytes, is known to fit; `software`: measured on no GPU."""

    workload: str
    peak: int
    step_ms: float
    software: bool

    def budget(self, fraction: float) -> int:
        """Return that share of the peak in whole pages, but at least `SMALLEST`."""
        return max(int(self.peak * fraction) // PAGE_BYTES * PAGE_BYTES, SMALLEST)

    def ample(self, room: int) -> int:
        """Return a budget well above the peak, and below `room`."""
        return min(max(int(1.2 * self.peak), self.peak + SMALLEST), room - PAGE_BYTES)


def run(context: Context) -> None:
    """Size every workload once, in one process of plain torch, for the parts that follow."""
    names = context.config.workloads
    with context.worker(GpuSpec(smallest(names[0]))) as plain:

        def measure(name: str, context: Context) -> None:
            sized = fit(name, context.guard, lambda text: _try(plain, text))
            context.record.details.setdefault("sized", {})[name] = asdict(sized)
            context.record.decide(
                f"size {short(name)}",
                QUESTION,
                f"{sized.workload}, with a peak of {format_bytes(sized.peak)}",
            )

        measure_each(context, QUESTION, [(f"size {short(name)}", name) for name in names], measure)


def known(context: Context) -> dict[str, Sized]:
    """Return the results of the part `sizing` by the names of the workloads.

    Raises:
        RuntimeError: not all of them were sized.
    """
    record = load(context.folder / "sizing.json")
    sized = {} if record is None else record.details.get("sized", {})
    lacking = [name for name in context.config.workloads if name not in sized]
    if lacking:
        raise RuntimeError(f"the part sizing has no size of {', '.join(map(short, lacking))}")
    return {name: Sized(**sized[name]) for name in context.config.workloads}


def fit(name: str, guard: Guard, attempt: Callable[[str], Sized]) -> Sized:
    """Return the workload as named, or with a smaller batch if its peak would not fit.

    Raises:
        GuardError: not even one sample fits.
    """
    text, room = name, int(SHARE * guard.room)
    for _ in range(TRIES):
        sized = attempt(text)
        if sized.peak <= room:
            return sized
        smaller = int(workloads.lookup(text).batch * 0.9 * room / sized.peak)
        if smaller < 1:
            break
        text = with_batch(name, smaller)
    raise GuardError(
        f"{name} needs {format_bytes(sized.peak)}, and a workload may take {format_bytes(room)} of "
        "this device: use one with more free memory"
    )


def _try(plain: WorkerProcess, text: str) -> Sized:
    answer = plain.call("rebuild", workload=text, steps=3)
    if not answer["fits"]:
        raise RuntimeError(answer["reason"])
    seen = plain.call("peak")
    return Sized(text, seen["allocated"], answer["ms"], is_software(seen["device"]))


def smallest(name: str) -> str:
    """Return the workload with one sample: for the start of a process that is to train others."""
    return with_batch(name, 1)


def with_batch(name: str, batch: int) -> str:
    """Return the workload with another batch."""
    base, _, settings = name.partition(":")
    kept = [part for part in settings.split(",") if part and not part.startswith("batch=")]
    return f"{base}:{','.join([*kept, f'batch={batch}'])}"


def short(name: str) -> str:
    """Return the workload's name without its settings."""
    return name.partition(":")[0]
