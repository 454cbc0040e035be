"""The statistics as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from ..base.stats import Stats, plan_hit_share
from ..base.units import DAY_US, format_bytes, with_staging
from .metrics import is_measured

_WORTH = 1.05  # times as long as without transfers, from which a change is named
_ELSE = (
    "; if there is no more memory, `umem run --report FILE.html` replays the step with "
    "recompute=auto and optimizer=auto"
)
_MUCH = 8  # the part of the budget from which unmanaged bytes are worth a line
_MANY_FAULTS = 10  # per operator: fewer are not worth a line
_LEAST_US = 1_000_000  # of a run: the rate of a shorter one says little
_WRITTEN = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6))
Row = tuple[str, str, str]  # name, value, note
Holders = Mapping[str, tuple[int, int]]  # blocks and live bytes of each framework other than torch


class StepCost(NamedTuple):
    """The cost of the budget in the last recorded step."""

    slowdown: float  # its estimated time over that of its compute alone
    peak_bytes: int  # with which it moves nothing
    trains: bool = True  # it has gradients or optimizer states


def _summary(text: str, rows: list[Row]) -> Summary:
    made = str.__new__(Summary, text)
    made._rows = rows
    return made


class Summary(str):
    """The figures as text, which a terminal shows as it is and a notebook as a table."""

    __slots__ = ("_rows",)
    _rows: list[Row]

    def __new__(
        cls,
        stats: Stats,
        *,
        device: str,
        policy: str,
        allocator: str = "",
        holders: Holders | None = None,
        advice: Sequence[str] = (),
    ) -> Summary:
        """Format the lines of `summary`, and after them those of `advice`."""
        rows = _rows(stats, device, policy, allocator, holders)
        rows += [("" if i else "advice", "", text) for i, text in enumerate(advice)]
        return _summary(_lines(rows), rows)

    def __repr__(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _summary, (str(self), self._rows)

    def _repr_html_(self) -> str:
        """Return the HTML table that a notebook shows."""
        right = "text-align: right"
        lines = [
            f"<tr><th>{escape(name)}</th><td style='{right}'>{escape(value)}</td>"
            f"<td>{escape(note)}</td></tr>"
            for name, value, note in self._rows
        ]
        return "<table>" + "".join(lines) + "</table>"


def _lines(rows: list[Row]) -> str:
    return "\n".join(f"{name:<12} {value:>12}  {note}".rstrip() for name, value, note in rows)


def _rows(
    stats: Stats, device: str, policy: str, allocator: str, holders: Holders | None
) -> list[Row]:
    return [
        ("budget", _of(stats.budget_bytes), f"device {device}, policy {policy}"),
        *([("allocator", "", allocator)] if allocator else []),
        ("resident", _of(stats.resident_bytes), f"peak {_of(stats.peak_resident_bytes)}"),
        ("live", _of(stats.live_bytes), _live(stats)),
        *((f"  {name}", _of(count), f"{n} blocks") for name, (n, count) in (holders or {}).items()),
        ("cached", _of(stats.cached_bytes), "freed, kept for reuse"),
        *_attached(stats),
        ("dropped", _of(stats.dropped_bytes), "discarded, reclaimable by the driver"),
        ("on the host", _of(stats.host_bytes), _host(stats)),
        *_unmanaged(stats),
        *([("pinned", _of(stats.pinned_bytes), "by pin and keep")] if stats.pinned_bytes else []),
        *([("asleep", _of(stats.asleep_bytes), "until wake")] if stats.asleep_bytes else []),
        ("moved in", _of(stats.bytes_in), _unused(stats)),
        ("moved out", _of(stats.bytes_out), f"{stats.evictions} evictions"),
        ("not moved", _of(stats.bytes_discarded), "copies avoided"),
        *_link(stats),
        *_disk(stats),
        *_faults(stats, device),
        ("allocations", str(stats.allocs), f"{stats.frees} freed, {stats.ooms} refused"),
        ("steps", str(stats.steps), _plan(stats)),
    ]


def _live(stats: Stats) -> str:
    small = f", {_of(stats.peak_small_bytes)} of it in tensors below 2 MiB"
    return f"peak {_of(stats.peak_live_bytes)}{small if stats.peak_small_bytes else ''}"


def _attached(stats: Stats) -> list[Row]:
    if stats.attached_bytes <= stats.resident_bytes + stats.dropped_bytes:
        return []
    return [("attached", _of(stats.attached_bytes), "kept by the driver, until others need it")]


def _unmanaged(stats: Stats) -> list[Row]:
    if not stats.peak_unmanaged_bytes:
        return []
    return [("unmanaged", _of(stats.peak_unmanaged_bytes), "used by one step's operators at most")]


def closing(
    stats: Stats,
    why_unplanned: str = "",
    faults: Sequence[tuple[str, int]] = (),
    name: str = "umem",
    device: str = "",
    **known: Any,
) -> str:
    """Summarize the run in one line, for the end of a program, with advice in further lines.

    Args:
        device: "cuda" has no figure of faults.
        name: the start of each line.
        known: the other arguments of `advice`.
    """
    share = plan_hit_share(stats.plan_hits, stats.plan_misses)
    hits = "no plan used"
    if share is not None:
        total = stats.plan_hits + stats.plan_misses
        hits = f"plan hits {100 * share:.1f} % ({stats.plan_hits} of {total} ops)"
    plans = "plan" if stats.plans_rolled_back == 1 else "plans"
    given_up = f", {stats.plans_rolled_back} {plans} rolled back" if stats.plans_rolled_back else ""
    line = (
        f"{name}: {stats.steps} {'step' if stats.steps == 1 else 'steps'}, {hits}{given_up}, "
        f"{_of(stats.bytes_in)} in, {_of(stats.bytes_out)} out, "
        f"{f'{stats.faults} faults, ' if is_measured('faults', device) else ''}"
        f"peak {_of(stats.peak_resident_bytes)} of {_of(stats.budget_bytes)}, "
        f"live at most {_of(stats.peak_live_bytes)}"
    )
    if stats.disk_bytes_out and stats.steps:
        line += f", {_of(stats.disk_bytes_out // stats.steps)} a step written to the disk"
        if wear := _written_a_day(stats):
            line += f", {wear}"
    lines = advice(stats, why_unplanned, faults, **known)
    return "\n".join([line, *(f"{name}: {text}" for text in lines)])


def advice(
    stats: Stats,
    why_unplanned: str = "",
    faults: Sequence[tuple[str, int]] = (),
    *,
    fullest: Stats | None = None,
    step: StepCost | None = None,
    tried: bool = False,
    disk_writes: int = 0,
) -> list[str]:
    """Return what umem does not manage, the largest costs, and last the first thing to change.

    Costs and changes are named only if bytes moved.
    A change is named only if it makes the recorded step at least 5 % faster, as far as known.

    Args:
        why_unplanned: why recorded steps had no plan; empty if all had one.
        faults: the operators that took page faults, with their numbers, in descending order.
        fullest: of the device that needs most beyond its budget; None: of the only device.
        step: of that device; None if no step was planned there.
        tried: the run records a trace for a report, or has both options that a report tries.
        disk_writes: the bytes a day that may be written; 0: unlimited.
    """
    lines = []
    if 0 < disk_writes < _bytes_a_day(stats):
        lines.append(
            f"the disk is written at more than disk_writes, {_written(disk_writes)} a day; "
            "docs/disk.md says what writes less"
        )
    if stats.peak_unmanaged_bytes > stats.budget_bytes / _MUCH:
        lines.append(
            f"a step used {_of(stats.peak_unmanaged_bytes)} that umem does not manage: tensors "
            "made before umem.enable() or in another pool, or memory of another library (a mapped "
            "file, an array)"
        )
    if stats.bytes_in == stats.bytes_out == stats.faults == 0:
        return lines
    one = stats if fullest is None else fullest
    whole = with_staging if stats.disk_file_bytes else int  # what the option has to be
    short = one.peak_live_bytes > one.budget_bytes
    if faults and faults[0][1] >= _MANY_FAULTS:
        name, count = faults[0]
        lines.append(f"{name} took {count} of {stats.faults} page faults, more than any other")
    if stats.peak_small_bytes > stats.peak_live_bytes / 2:
        small = f"{_of(stats.peak_small_bytes)} of {_of(stats.peak_live_bytes)}"
        lines.append(f"{small} were in tensors below 2 MiB: they move with those in the same page")
    if short and why_unplanned:
        lines.append(why_unplanned)
    if one.largest_op_bytes > one.budget_bytes:
        operators = "operator" if one.ops_above_budget == 1 else "operators"
        lines.append(
            f"change first: a budget of {_of(whole(one.largest_op_bytes))}: {one.ops_above_budget} "
            f"{operators} alone needed up to that, more than the budget, and were slow"
        )
    elif short and (step is None or step.slowdown >= _WORTH):
        peak = one.peak_live_bytes if step is None else step.peak_bytes
        moves = "nothing moves" if step is None else "a step moves nothing"
        line = f"change first: a budget of about {_of(whole(peak))}, at which {moves}"
        to_try = not tried and (step is None or step.trains)
        lines.append(line + _ELSE if to_try else line)
    return lines


def _of(count: int) -> str:
    return format_bytes(count)


def _host(stats: Stats) -> str:
    limit = stats.host_budget_bytes
    return f"peak {_of(stats.peak_host_bytes)} of {_of(limit) if limit else 'unlimited'}"


def _unused(stats: Stats) -> str:
    return f"{stats.prefetches} prefetches, {_of(stats.prefetched_unused_bytes)} wasted"


def _link(stats: Stats) -> list[Row]:
    if not stats.timed_busy_in_us or not stats.timed_busy_out_us:
        return []
    into = stats.timed_bytes_in / stats.timed_busy_in_us / 1e3
    out = stats.timed_bytes_out / stats.timed_busy_out_us / 1e3
    return [
        ("link", f"{into:.1f} GB/s", f"in; {out:.1f} GB/s out, of the transfers that were timed")
    ]


def _disk(stats: Stats) -> list[Row]:
    if not stats.disk_file_bytes:
        return []
    used = stats.disk_open_us / 1e6
    read = f"read {_of(stats.disk_bytes_in)} in {stats.disk_busy_in_us / 1e3:.0f} ms"
    wrote = f"wrote {_of(stats.disk_bytes_out)} in {stats.disk_busy_out_us / 1e3:.0f} ms"
    if wear := _written_a_day(stats):
        wrote += f", {wear}"
    return [("on disk", _of(stats.disk_file_bytes), f"reserved for {used:.0f} s, {read}, {wrote}")]


def _written_a_day(stats: Stats) -> str:
    """Say what the program would write in a day, as drives are rated; empty if it is too early."""
    count = _bytes_a_day(stats)
    return f"{_written(count)} a day at this rate" if count else ""


def _written(count: float) -> str:
    """Format bytes as the makers of drives do."""
    unit, size = next((u for u in _WRITTEN if count >= u[1] / 10), _WRITTEN[-1])
    return f"{count / size:,.0f} {unit}" if count >= 10 * size else f"{count / size:.2g} {unit}"


def _bytes_a_day(stats: Stats) -> float:
    if stats.disk_open_us < _LEAST_US:
        return 0
    return stats.disk_bytes_out / stats.disk_open_us * DAY_US


def _faults(stats: Stats, device: str) -> list[Row]:
    if not is_measured("faults", device):
        return []
    kind = "" if stats.disk_file_bytes else " (virtual)"
    waited = f"compute waited {stats.stall_us / 1e3:.1f} ms{kind}"
    return [("faults", str(stats.faults), waited)]


def _plan(stats: Stats) -> str:
    total = stats.plan_hits + stats.plan_misses
    notes = [f"{stats.plan_hits} of {total} ops as planned"] if total else []
    if stats.plans_rolled_back:
        notes.append(f"plans rolled back as slower than lru: {stats.plans_rolled_back}")
    if stats.advice_ignored:
        notes.append(f"{stats.advice_ignored} blocks chosen by the policy could not be evicted")
    if stats.ops_above_budget or stats.largest_op_bytes:
        largest = _of(stats.largest_op_bytes)
        text = f"ops that alone needed more than the budget: {stats.ops_above_budget}"
        notes.append(f"{text} (up to {largest})")
    if stats.zero_copy_bytes:
        notes.append(f"{_of(stats.zero_copy_bytes)} used on the host, as they did not fit")
    if stats.capture_skips:
        notes.append(f"{stats.capture_skips} moves skipped during graph capture")
    if stats.hook_errors:
        notes.append(f"{stats.hook_errors} driver calls failed and were replaced by page faults")
    return ", ".join(notes)
