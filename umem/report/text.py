"""The statistics as text."""

from __future__ import annotations

from ..statistics import Stats
from ..units import format_bytes


def summary(stats: Stats, *, device: str, policy: str, allocator: str = "") -> str:
    """Some lines that say what the figures mean together."""
    rows = [
        ("budget", _of(stats.budget_bytes), f"device {device}, policy {policy}"),
        *([("allocator", "", allocator)] if allocator else []),
        ("resident", _of(stats.resident_bytes), f"peak {_of(stats.peak_resident_bytes)}"),
        ("live", _of(stats.live_bytes), f"peak {_of(stats.peak_live_bytes)}"),
        ("cached", _of(stats.cached_bytes), "freed, kept for reuse"),
        ("dropped", _of(stats.dropped_bytes), "discarded, the driver's to take"),
        ("on the host", _of(stats.host_bytes), _host(stats)),
        ("moved in", _of(stats.bytes_in), _unused(stats)),
        ("moved out", _of(stats.bytes_out), f"{stats.evictions} evictions"),
        ("not moved", _of(stats.bytes_discarded), "dead bytes"),
        ("faults", str(stats.faults), f"compute waited {stats.stall_us / 1e3:.1f} ms (virtual)"),
        ("allocations", str(stats.allocs), f"{stats.frees} freed, {stats.ooms} refused"),
        ("steps", str(stats.steps), _plan(stats)),
    ]
    return "\n".join(f"{name:<12} {value:>12}  {note}".rstrip() for name, value, note in rows)


def closing(stats: Stats) -> str:
    """What umem did, in one line for a program's end."""
    total = stats.plan_hits + stats.plan_misses
    share = f"{100 * stats.plan_hits / total:.1f} %" if total else "none"
    plans = "plan" if stats.plans_retracted == 1 else "plans"
    given_up = f", {stats.plans_retracted} {plans} given up" if stats.plans_retracted else ""
    return (
        f"umem: {stats.steps} steps, plan hits {share} ({stats.plan_hits} of {total} ops)"
        f"{given_up}, {_of(stats.bytes_in)} in, {_of(stats.bytes_out)} out, {stats.faults} faults, "
        f"peak {_of(stats.peak_resident_bytes)} of {_of(stats.budget_bytes)}"
    )


def _of(count: int) -> str:
    return format_bytes(count)


def _host(stats: Stats) -> str:
    limit = stats.host_budget_bytes
    return f"peak {_of(stats.peak_host_bytes)} of {_of(limit) if limit else 'unlimited'}"


def _unused(stats: Stats) -> str:
    return f"{stats.prefetches} prefetches, {_of(stats.prefetched_unused_bytes)} not used"


def _plan(stats: Stats) -> str:
    total = stats.plan_hits + stats.plan_misses
    notes = [f"{stats.plan_hits} of {total} ops as planned"] if total else []
    if stats.plans_retracted:
        notes.append(f"plans given up as worse than lru: {stats.plans_retracted}")
    if stats.advice_ignored:
        notes.append(f"{stats.advice_ignored} blocks that a policy named could not leave")
    if stats.capture_skips:
        notes.append(f"{stats.capture_skips} movements left out while graphs were captured")
    if stats.hook_errors:
        notes.append(f"{stats.hook_errors} driver calls failed, page faults made up for them")
    return ", ".join(notes)
