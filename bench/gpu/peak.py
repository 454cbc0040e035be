"""(e) The device bytes really in use against the budget, and the losses against plain torch's."""

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
    record.add(
        f"{short(name)}: peak device bytes to the budget", [used / budget], "x", target=TARGET
    )
    record.details.setdefault("peak", {})[short(name)] = {
        "workload": sized.workload,
        "budget": budget,
        "device_bytes_used": under["used"],
        "outside_bytes": outside,
        "peak_resident_bytes": under["stats"]["peak_resident_bytes"],
        "losses": under["losses"],
        "plain_losses": [plain["losses"], plain["losses_again"]],
    }
    record.decide(
        f"e {short(name)}",
        QUESTION,
        software.NOT_COMPARABLE
        if sized.software
        else f"{format_bytes(used)} of the device at a budget of {format_bytes(budget)}; "
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
