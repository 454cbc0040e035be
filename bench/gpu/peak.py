"""(e) Resident bytes against the budget, the device's own figure, and losses against plain torch's.

The budget limits bytes with contents. The driver keeps the memory of those that left, and counts it
as used (docs/decisions/0010), so its figure is compared with `attached_bytes` and has no target.
"""

from __future__ import annotations

from typing import Any

from gpu import software
from gpu.children import GpuSpec, worker
from gpu.context import Context, measure_each
from gpu.sizing import Sized, short, size
from umem.base.units import format_bytes

TARGET = 1.02  # times the budget
FRACTION = 0.5
QUESTION = "does umem keep its budget, and compute the same?"


def run(context: Context) -> None:
    """Fill the record."""
    names = [(f"e {short(name)}", name) for name in context.config.workloads]
    measure_each(context, QUESTION, names, _measure)


def _measure(name: str, context: Context) -> None:
    record, sized = context.record, size(name, context)
    plain = _train(sized, None, context)
    # Context, kernels and libraries take device memory that no allocator of torch's counts.
    outside = plain["peak"]["used_now"] - plain["peak"]["reserved_now"]
    budget = sized.budget(FRACTION)
    under = _train(sized, budget, context)
    used = max(under["used"] - outside, 0)
    resident, attached = (under["stats"][f"{what}_bytes"] for what in ("peak_resident", "attached"))
    record.add(
        f"{short(name)}: peak resident bytes to the budget", [resident / budget], "x", target=TARGET
    )
    record.add(f"{short(name)}: device bytes in use to attached bytes", [used / attached], "x")
    record.details.setdefault("peak", {})[short(name)] = {
        "workload": sized.workload,
        "budget": budget,
        "device_bytes_used": under["used"],
        "outside_bytes": outside,
        "peak_resident_bytes": resident,
        "attached_bytes": attached,
        "losses": under["losses"],
        "plain_losses": [plain["losses"], plain["losses_again"]],
    }
    record.decide(
        f"e {short(name)}",
        QUESTION,
        software.NOT_COMPARABLE
        if sized.software
        else f"{format_bytes(resident)} resident at a budget of {format_bytes(budget)}, "
        f"{format_bytes(used)} of the device in use; "
        + same_losses(plain["losses"], plain["losses_again"], under["losses"]),
    )


def same_losses(plain: list[float], again: list[float], umem: list[float]) -> str:
    """Describe plain torch twice, then umem, step by step."""
    if plain != again:
        return "losses not comparable: plain torch does not repeat its own"
    return "the losses are plain torch's, bit by bit" if umem == plain else "the losses DIFFER"


def _train(sized: Sized, budget: int | None, context: Context) -> dict[str, Any]:
    """Under umem, or, with no budget, in plain torch and there once more."""
    spec = GpuSpec(sized.workload, budget=budget, torch_ext_cache=context.cache)
    count = context.config.warm_steps + context.config.steps
    with worker(context.guard, spec) as process:
        watched = process.call("watch", count=count)
        outcome = {**watched, "peak": process.call("peak"), "stats": process.stats()}
        if budget is None:
            again = process.call("rebuild", workload=sized.workload, steps=count)
            outcome["losses_again"] = again.get("losses", [])
    outcome["losses"] = [step["loss"] for step in watched["steps"]]
    return outcome
