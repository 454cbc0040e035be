"""Sizes of the workloads that can run under the guard."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gpu import workloads
from gpu.children import SMALLEST, GpuSpec, worker
from gpu.context import Context, measure_each
from gpu.guard import Guard, GuardError
from gpu.record import load
from gpu.software import is_software
from umem.base.units import PAGE_BYTES, format_bytes

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

    def ample(self, guard: Guard) -> int:
        """Return a budget well above the peak."""
        return min(max(int(1.2 * self.peak), self.peak + SMALLEST), guard.room - PAGE_BYTES)


def run(context: Context) -> None:
    """Size every workload once, for the parts that follow."""
    names = [(f"size {short(name)}", name) for name in context.config.workloads]
    measure_each(context, QUESTION, names, _keep)


def _keep(name: str, context: Context) -> None:
    sized = fit(name, context.guard)
    context.record.details.setdefault("sized", {})[name] = asdict(sized)
    context.record.decide(
        f"size {short(name)}",
        QUESTION,
        f"{sized.workload}, with a peak of {format_bytes(sized.peak)}",
    )


def size(name: str, context: Context) -> Sized:
    """Return the result of the part `sizing`, or a new measurement."""
    record = load(context.folder / "sizing.json")
    known = {} if record is None else record.details.get("sized", {})
    return Sized(**known[name]) if name in known else fit(name, context.guard)


def fit(name: str, guard: Guard) -> Sized:
    """Return the workload as named, or with a smaller batch if its peak would not fit.

    Raises:
        GuardError: not even one sample fits.
    """
    text = name
    for _ in range(TRIES):
        with worker(guard, GpuSpec(text)) as plain:
            plain.step(2)
            step_ms = plain.step()[0]["ms"]
            seen = plain.call("peak")
        peak = seen["allocated"]
        room = int(SHARE * guard.room)
        if peak <= room:
            return Sized(text, peak, step_ms, is_software(seen["device"]))
        batch = workloads.lookup(text).batch
        smaller = int(batch * 0.9 * room / peak)
        if smaller < 1:
            break
        text = with_batch(name, smaller)
    raise GuardError(
        f"{name} needs {format_bytes(peak)}, and a workload may take {format_bytes(room)} of this "
        "device: use one with more free memory"
    )


def with_batch(name: str, batch: int) -> str:
    """Return the workload with another batch."""
    base, _, settings = name.partition(":")
    kept = [part for part in settings.split(",") if part and not part.startswith("batch=")]
    return f"{base}:{','.join([*kept, f'batch={batch}'])}"


def short(name: str) -> str:
    """Return the workload's name without its settings."""
    return name.partition(":")[0]
