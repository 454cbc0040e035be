"""(e) The largest batch at a fixed budget: torch's own allocator, and umem."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from gpu.children import GpuSpec
from gpu.config import BatchSearch
from gpu.context import Context, measure_each
from gpu.deadline import Deadline
from gpu.device import whole_pages
from gpu.sizing import short, smallest, with_batch
from umem.base.units import format_bytes
from umem.demo.process import WorkerProcess

QUESTION = "how large a batch can train at the budget?"


def run(context: Context) -> None:
    """Fill the record. Both processes run first; the searches share the time after that."""
    searches = [(f"e {short(search.workload)}", search) for search in context.config.searches]
    room, start = context.guard.room, smallest(searches[0][1].workload)
    with contextlib.ExitStack() as stack:
        processes = {
            "torch": stack.enter_context(context.worker(GpuSpec(start))),
            "umem": stack.enter_context(
                context.worker(GpuSpec(start, budget=whole_pages(room / 2)))
            ),
        }

        def measure(search: BatchSearch, context: Context) -> None:
            _search(search, context, processes, room)

        measure_each(context, QUESTION, searches, measure)


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


def _search(
    search: BatchSearch, context: Context, processes: dict[str, WorkerProcess], room: int
) -> None:
    """`room` is what umem may hold in all."""
    record, deadline, name = context.record, context.deadline, short(search.workload)
    budget = min(search.budget, whole_pages(room / 2))
    found: dict[str, int | None] = {}
    reasons: dict[str, str] = {}
    times: dict[str, float] = {}
    for i, (who, process) in enumerate(processes.items()):
        process.call("configure", budget=budget, host_budget=room - budget)

        def fits(batch: int, who: str = who, process: WorkerProcess = process) -> bool:
            answer = process.call("rebuild", workload=with_batch(search.workload, batch))
            if answer["fits"]:
                times[f"{who} {batch}"] = answer["ms"]
            else:
                reasons[who] = answer["reason"]
            return bool(answer["fits"])

        share = deadline.within(deadline.left / (len(processes) - i))
        found[who] = largest(search.batches, fits, share)
        process.call("rebuild", workload=smallest(search.workload))  # gives the memory back
        if share.passed:
            record.leave_out(f"{name}, {who}", "the search was cut: a larger batch may fit")
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
    words += [f"{who}'s last refusal: {reason}" for who, reason in reasons.items()]
    limited = "" if budget == search.budget else f" (not {format_bytes(search.budget)}: the guard)"
    record.decide(
        f"e {name}",
        QUESTION,
        f"at {format_bytes(budget)}{limited}: {'; '.join(words)}; batches tried "
        f"{search.batches[0]} to {search.batches[-1]}; umem may hold {format_bytes(room)} in all, "
        "which is the bench's limit, not umem's",
    )
