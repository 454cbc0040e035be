"""(f) Resident bytes against the budget, the device's own figure, and losses against plain torch's.

The budget limits bytes with contents. The driver keeps the memory of those that left, and counts it
as used (docs/decisions/0010), so its figure is compared with `attached_bytes` and has no target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu import sizing, software
from gpu.children import GpuSpec
from gpu.context import Context, measure_each
from gpu.device import whole_pages
from gpu.record import Record
from gpu.sizing import Sized, short, smallest
from umem.base.units import format_bytes
from umem.demo.process import WorkerProcess

TARGET = 1.02  # times the budget
FRACTION = 0.5
QUESTION = "does umem keep its budget, and compute the same?"


@dataclass(frozen=True)
class Plain:
    """The losses of plain torch, twice, and the device bytes that no allocator of torch counts:
    contexts, kernels and libraries.
    """

    losses: list[float]
    again: list[float]
    outside: int


def run(context: Context) -> None:
    """Fill the record: plain torch trains all workloads, then umem, alone on the device."""
    sizes, room = sizing.known(context), context.guard.room
    start = smallest(context.config.workloads[0])
    count = context.config.planning_steps + context.config.steps
    plain: dict[str, Plain] = {}
    with context.worker(GpuSpec(start)) as process:

        def learn(name: str, _: Context) -> None:
            plain[name] = _plain(sizes[name], process, count)

        names = [(f"f {short(name)}, plain", name) for name in sizes]
        measure_each(context.share(1 / 3), QUESTION, names, learn)

    with context.worker(GpuSpec(start, budget=whole_pages(room / 2))) as process:

        def measure(name: str, context: Context) -> None:
            if name not in plain:
                raise RuntimeError("plain torch did not train it")
            budget = sizes[name].budget(FRACTION)
            process.call("configure", budget=budget, host_budget=room - budget)
            watched = _train(sizes[name], process, count)
            watched["stats"] = process.stats()
            _report(sizes[name], budget, plain[name], watched, context.record)

        names = [(f"f {short(name)}", name) for name in sizes]
        measure_each(context, QUESTION, names, measure)


def _train(sized: Sized, process: WorkerProcess, count: int) -> dict[str, Any]:
    """Train from the start, and watch the device meanwhile."""
    answer = process.call("rebuild", workload=sized.workload, steps=0)
    if not answer["fits"]:
        raise RuntimeError(answer["reason"])
    return process.call("watch", count=count)


def _plain(sized: Sized, process: WorkerProcess, count: int) -> Plain:
    first, again = (_losses(_train(sized, process, count)) for _ in range(2))
    seen = process.call("peak")
    return Plain(first, again, seen["used_now"] - seen["reserved_now"])


def _losses(watched: dict[str, Any]) -> list[float]:
    return [step["loss"] for step in watched["steps"]]


def _report(
    sized: Sized, budget: int, plain: Plain, watched: dict[str, Any], record: Record
) -> None:
    name, losses = short(sized.workload), _losses(watched)
    used = max(watched["used"] - plain.outside, 0)
    stats = watched["stats"]
    resident, attached = stats["peak_resident_bytes"], stats["attached_bytes"]
    record.add(
        f"{name}: peak resident bytes to the budget", [resident / budget], "x", target=TARGET
    )
    record.add(f"{name}: device bytes in use to attached bytes", [used / attached], "x")
    record.details.setdefault("peak", {})[name] = {
        "workload": sized.workload,
        "budget": budget,
        "device_bytes_used": watched["used"],
        "outside_bytes": plain.outside,
        "peak_resident_bytes": resident,
        "attached_bytes": attached,
        "losses": losses,
        "plain_losses": [plain.losses, plain.again],
    }
    record.decide(
        f"f {name}",
        QUESTION,
        software.NOT_COMPARABLE
        if sized.software
        else f"{format_bytes(resident)} resident at a budget of {format_bytes(budget)}, "
        f"{format_bytes(used)} of the device in use; "
        + same_losses(plain.losses, plain.again, losses),
    )


def same_losses(plain: list[float], again: list[float], umem: list[float]) -> str:
    """Describe plain torch twice, then umem, step by step."""
    if plain != again:
        return "losses not comparable: plain torch does not repeat its own"
    return "the losses are plain torch's, bit by bit" if umem == plain else "the losses DIFFER"
