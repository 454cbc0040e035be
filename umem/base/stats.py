"""The statistics record, with the fields of src/runtime/stats.def; a test compares the two."""

from __future__ import annotations

from dataclasses import asdict, dataclass


def plan_hit_share(hits: int, misses: int) -> float | None:
    """Return the share of operators that followed the plan, 0 to 1; None if none had a plan."""
    planned = hits + misses
    return hits / planned if planned > 0 else None


@dataclass(frozen=True)
class Stats:
    """The statistics of umem at one moment; docs/options.md describes the fields.

    Fields named `_bytes` or `bytes_` are bytes. The `peak_` fields count from the start or the last
    `umem.reset_peak_stats()`.
    """

    budget_bytes: int
    host_budget_bytes: int
    resident_bytes: int
    peak_resident_bytes: int
    live_bytes: int
    peak_live_bytes: int
    peak_small_bytes: int
    cached_bytes: int
    attached_bytes: int
    dropped_bytes: int
    pinned_bytes: int
    asleep_bytes: int
    host_bytes: int
    peak_host_bytes: int
    bytes_in: int
    bytes_out: int
    timed_bytes_in: int
    timed_bytes_out: int
    timed_busy_in_us: int
    timed_busy_out_us: int
    bytes_discarded: int
    faults: int
    evictions: int
    prefetches: int
    prefetched_unused_bytes: int
    stall_us: int
    disk_bytes_in: int
    disk_bytes_out: int
    disk_busy_in_us: int
    disk_busy_out_us: int
    disk_open_us: int
    disk_file_bytes: int
    plan_hits: int
    plan_misses: int
    plans_rolled_back: int
    allocs: int
    frees: int
    ooms: int
    steps: int
    capture_skips: int
    hook_errors: int
    zero_copy_bytes: int
    ops_above_budget: int
    largest_op_bytes: int
    peak_unmanaged_bytes: int
    advice_ignored: int

    def _repr_html_(self) -> str:
        """Return the HTML table that a notebook shows."""
        rows = asdict(self).items()
        lines = (f"<tr><th>{name}</th><td>{value:,}</td></tr>" for name, value in rows)
        return f"<table>{''.join(lines)}</table>"
