"""(b) Everything fits: step time under umem against torch's own allocator, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

from harness import ratios

from gpu import software
from gpu.children import GpuSpec, worker
from gpu.context import Context, measure_each
from gpu.record import Record
from gpu.sizing import Sized, short, size
from umem.base.units import format_bytes
from umem.demo.process import WorkerProcess

TARGET = 1.01  # times torch's own allocator
QUESTION = "does umem cost nothing when everything fits?"


def run(context: Context) -> None:
    """Fill the record."""
    names = [(f"b {short(name)}", name) for name in context.config.workloads]
    measure_each(context, QUESTION, names, _measure)


def _measure(name: str, context: Context) -> None:
    guard, config = context.guard, context.config
    sized = size(name, context)
    under = GpuSpec(
        sized.workload,
        budget=sized.ample(guard),
        torch_ext_cache=context.cache,
        deterministic=False,
    )
    with (
        worker(guard, replace(under, budget=None)) as plain,
        worker(guard, under) as managed,
    ):
        both = {"torch": plain, "umem": managed}
        for each in both.values():
            each.step(config.warm_steps)
        times: dict[str, list[float]] = {key: [] for key in both}
        steps = {key: _step_of(each) for key, each in both.items()}
        for i in context.deadline.rounds(config.fits_rounds):
            for key in list(steps)[:: 1 if i % 2 else -1]:  # none is always first
                times[key].append(steps[key]())
        moved = managed.stats()
    _report(short(name), sized, times, moved, context.record)


def _step_of(process: WorkerProcess) -> Callable[[], float]:
    return lambda: statistics.median(record["ms"] for record in process.step())


def _report(
    name: str, sized: Sized, times: dict[str, list[float]], moved: dict[str, int], record: Record
) -> None:
    for key, values in times.items():
        record.add(f"{name}, fits: {key}, a step", values, "ms", note=sized.workload)
    ratio = ratios(times["umem"], times["torch"])
    values = [a / b for a, b in zip(times["umem"], times["torch"], strict=True)]
    record.add(f"{name}, fits: umem to torch", values, "x", target=TARGET)
    record.details.setdefault("fits", {})[name] = {
        "workload": sized.workload,
        "peak_bytes": sized.peak,
        "bytes_out": moved["bytes_out"],
    }
    record.decide(
        f"b {name}",
        QUESTION,
        software.NOT_COMPARABLE
        if sized.software
        else f"{ratio.median:.3f}x torch's step at a peak of {format_bytes(sized.peak)} "
        f"(target {TARGET}x); {format_bytes(moved['bytes_out'])} left the device",
    )
