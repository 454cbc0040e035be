"""(c) Everything fits: step time under umem against torch's own allocator, side by side."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable

from harness import ratios

from gpu import sizing, software
from gpu.children import GpuSpec
from gpu.context import Context, measure_each
from gpu.device import whole_pages
from gpu.record import Record
from gpu.sizing import Sized, short, smallest
from umem.base.units import format_bytes
from umem.demo.process import WorkerProcess

TARGET = 1.01  # times torch's own allocator
QUESTION = "does umem cost nothing when everything fits?"


def run(context: Context) -> None:
    """Fill the record. Two processes train all workloads, one after another."""
    sizes, room = sizing.known(context), context.guard.room
    start = smallest(context.config.workloads[0])
    with contextlib.ExitStack() as stack:
        plain = GpuSpec(start, deterministic=False)
        under = GpuSpec(start, deterministic=False, budget=whole_pages(room / 2))
        both = {
            "torch": stack.enter_context(context.worker(plain)),
            "umem": stack.enter_context(context.worker(under)),
        }

        def measure(name: str, context: Context) -> None:
            _measure(sizes[name], context, both, room)

        names = [(f"c {short(name)}", name) for name in sizes]
        measure_each(context, QUESTION, names, measure)


def _measure(sized: Sized, context: Context, both: dict[str, WorkerProcess], room: int) -> None:
    config, budget = context.config, sized.ample(room)
    both["umem"].call("configure", budget=budget, host_budget=room - budget)
    for process in both.values():
        answer = process.call("rebuild", workload=sized.workload, steps=config.planning_steps)
        if not answer["fits"]:
            raise RuntimeError(answer["reason"])
    before = both["umem"].stats()
    times: dict[str, list[float]] = {key: [] for key in both}
    steps = {key: _step_of(each) for key, each in both.items()}
    for i in context.deadline.rounds(config.fits_rounds):
        for key in list(steps)[:: 1 if i % 2 else -1]:  # none is always first
            times[key].append(steps[key]())
    moved = both["umem"].stats()["bytes_out"] - before["bytes_out"]
    _report(sized, times, moved, context.record)


def _step_of(process: WorkerProcess) -> Callable[[], float]:
    return lambda: statistics.median(record["ms"] for record in process.step())


def _report(sized: Sized, times: dict[str, list[float]], moved: int, record: Record) -> None:
    name = short(sized.workload)
    for key, values in times.items():
        record.add(f"{name}, fits: {key}, a step", values, "ms", note=sized.workload)
    ratio = ratios(times["umem"], times["torch"])
    values = [a / b for a, b in zip(times["umem"], times["torch"], strict=True)]
    record.add(f"{name}, fits: umem to torch", values, "x", target=TARGET)
    record.details.setdefault("fits", {})[name] = {
        "workload": sized.workload,
        "peak_bytes": sized.peak,
        "bytes_out": moved,
    }
    record.decide(
        f"c {name}",
        QUESTION,
        software.NOT_COMPARABLE
        if sized.software
        else f"{ratio.median:.3f}x torch's step at a peak of {format_bytes(sized.peak)} "
        f"(target {TARGET}x); {format_bytes(moved)} left the device",
    )
