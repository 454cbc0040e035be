"""(d) The largest batch at a fixed budget: torch's own allocator, and umem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpu.children import GpuSpec, worker
from gpu.config import BatchSearch
from gpu.context import Context, measure_each
from gpu.deadline import Deadline
from gpu.device import whole_pages
from gpu.sizing import short, with_batch
from umem.base.units import format_bytes

QUESTION = "how large a batch can train at the budget?"


def run(context: Context) -> None:
    """Fill the record."""
    searches = [(f"d {short(search.workload)}", search) for search in context.config.searches]
    measure_each(context, QUESTION, searches, _search)


def largest(batches: Sequence[int], fits: Callable[[int], bool], deadline: Deadline) -> int | None:
    """Return the largest of the ascending `batches` that fits, by bisection; None if none does.

    When the time is used up it is the largest that was seen to fit.
    """
    low, high = -1, len(batches)
    while high - low > 1 and not deadline.passed:
        middle = (low + high) // 2
        if fits(batches[middle]):
            low = middle
        else:
            high = middle
    return None if low < 0 else batches[low]


def _search(search: BatchSearch, context: Context) -> None:
    guard, record, deadline, cache = (
        context.guard,
        context.record,
        context.deadline,
        context.cache,
    )
    name = short(search.workload)
    budget = min(search.budget, whole_pages(guard.room / 2))
    found: dict[str, int | None] = {}
    reasons: dict[str, str] = {}
    times: dict[str, Any] = {}
    smallest = with_batch(search.workload, 1)
    specs = {
        "torch": GpuSpec(smallest, cap=budget, torch_ext_cache=cache),
        "umem": GpuSpec(smallest, budget=budget, torch_ext_cache=cache),
    }
    room = guard.room
    for i, (who, spec) in enumerate(specs.items()):
        part = deadline.within(deadline.left / (len(specs) - i))
        with worker(guard, spec) as process:

            def fits(batch: int, who: str = who, process: Any = process) -> bool:
                answer = process.call("rebuild", workload=with_batch(search.workload, batch))
                reasons[who] = answer.get("reason") or reasons.get(who, "")
                times[f"{who} {batch}"] = answer.get("ms")
                return bool(answer["fits"])

            found[who] = largest(search.batches, fits, part)
    record.details.setdefault("maxbatch", {})[name] = {
        "budget": budget,
        "managed_limit": room,
        "found": found,
        "reasons": reasons,
        "step_ms": times,
    }
    words = [
        f"{who} trains {'none of the tried' if batch is None else batch}"
        for who, batch in found.items()
    ]
    words += [f"{who}'s last refusal: {reason}" for who, reason in reasons.items() if reason]
    limited = "" if budget == search.budget else f" (not {format_bytes(search.budget)}: the guard)"
    record.decide(
        f"d {name}",
        QUESTION,
        f"at {format_bytes(budget)}{limited}: {'; '.join(words)}; batches tried "
        f"{search.batches[0]} to {search.batches[-1]}; umem may hold {format_bytes(room)} in all, "
        "which is the bench's limit, not umem's",
    )
