"""Statistics of a running process as text: the difference of two samples gives rates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..base.stats import plan_hit_share
from ..base.units import format_bytes
from ..errors import plain
from .metrics import OF_A_PROCESS, growth, is_measured

_BAR = 30
_SAME = 0.02  # steps a second that differ by less than this share are the same
_SUMMED = ("resident_bytes", "budget_bytes", "host_bytes")
_SUMMED_RATES = ("in_bytes_per_s", "out_bytes_per_s", "faults_per_s")
_MIN_S = 1e-3  # shorter times, which a peer could claim, give no rate
Sample = Mapping[str, Any]  # as umem/monitor/server.py sends it


def view(now: Sample, before: Sample | None) -> dict[str, Any]:
    """Return the values to show: bytes, bytes per second, and shares from 0 to 1.

    Rates need an earlier sample of the same process; without one they are None.
    """
    stats = now["stats"]
    earlier = before["stats"] if before is not None and before["pid"] == now["pid"] else None
    seconds = now["time"] - before["time"] if before is not None and earlier is not None else 0.0
    grown = stats if earlier is None else growth(stats, earlier)

    def rate(name: str) -> float | None:
        if earlier is None or seconds < _MIN_S or not is_measured(name, now["device"]):
            return None
        return float(grown[name] / seconds)

    return {
        **{name: now[name] for name in OF_A_PROCESS},
        "seconds": seconds if earlier is not None else None,
        "in_bytes_per_s": rate("bytes_in"),
        "out_bytes_per_s": rate("bytes_out"),
        "faults_per_s": rate("faults"),
        "steps_per_s": rate("steps"),
        "plan_hit_share": plan_hit_share(grown["plan_hits"], grown["plan_misses"]),
        "stats": dict(stats),
        "tags": {name: dict(row) for name, row in now["tags"].items()},
    }


def render(view: Mapping[str, Any]) -> str:
    """Format the view for a terminal, without control characters."""
    stats = view["stats"]
    lines = [
        f"umem top: pid {view['pid']}  {plain(view['program'])}",
        f"device {plain(view['device'])}, policy {plain(view['policy'])}, {stats['steps']} steps"
        f"{_a_second(view['steps_per_s'], '.2f')}",
        "",
        f"resident  {_bar(stats['resident_bytes'], stats['budget_bytes'])}",
        f"live      {format_bytes(stats['live_bytes'])}, cached "
        f"{format_bytes(stats['cached_bytes'])}, dropped {format_bytes(stats['dropped_bytes'])}, "
        f"attached {format_bytes(stats['attached_bytes'])}, "
        f"pinned {format_bytes(stats['pinned_bytes'])}, "
        f"asleep {format_bytes(stats['asleep_bytes'])}",
        f"host      {_host(stats)}",
        f"lane in   {_moved(stats['bytes_in'], view['in_bytes_per_s'])}",
        f"lane out  {_moved(stats['bytes_out'], view['out_bytes_per_s'])}",
        *_faults(view),
        f"plan      {_plan(view['plan_hit_share'], stats)}",
        "",
        f"{'tag':<12}{'blocks':>8}{'bytes':>14}{'resident':>14}{'evicted':>14}",
    ]
    return "\n".join(lines + [_row(name, row) for name, row in _largest(view["tags"])])


def overall(views: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the views of several processes with their sum, and the socket of the slowest one.

    The slowest has the fewest steps a second, or none. Ranks that wait for each other have the same
    rate; among those within `_SAME` or one step of it, the slowest moves the most bytes. None if
    fewer than two have made steps.
    """
    stepping = [v for v in views if v["stats"]["steps"] and v["steps_per_s"] is not None]
    slowest = None
    if len(stepping) > 1:
        fewest = min(view["steps_per_s"] for view in stepping)
        most = fewest * (1 + _SAME)
        near = (v for v in stepping if v["steps_per_s"] <= most + 1 / v["seconds"])
        slowest = max(near, key=_moved_per_s)["socket"]
    return {
        "processes": list(views),
        "sum": {
            **{name: sum(view["stats"][name] for view in views) for name in _SUMMED},
            **{name: _sum(view[name] for view in views) for name in _SUMMED_RATES},
        },
        "slowest": slowest,
    }


def render_all(found: Mapping[str, Any]) -> str:
    """Format what `overall` returns as a table, a process a line, without control characters."""
    views, total = found["processes"], found["sum"]
    count = f"{len(views)} process{'' if len(views) == 1 else 'es'}"
    head = ("pid", "resident", "budget", "host", "in/s", "out/s", "faults/s", "steps/s", "plan")
    lines = [f"umem top: {count}", "", _columns(*head, "program")]
    for view in views:
        steps, share = view["steps_per_s"], view["plan_hit_share"]
        lines.append(
            _columns(
                plain(view["socket"]),
                *_figures(view["stats"], view),
                "-" if steps is None else f"{steps:.2f}",
                "-" if share is None else f"{100 * share:.1f} %",
                plain(view["program"]),
            )
        )
    lines.append(_columns("sum", *_figures(total, total), "", "", ""))
    for view in views:
        if view["socket"] == found["slowest"]:
            lines += ["", f"slowest: {plain(view['socket'])} {plain(view['program'])}"]
    return "\n".join(line.rstrip() for line in lines)


def _sum(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _faults(view: Mapping[str, Any]) -> list[str]:
    if not is_measured("faults", view["device"]):
        return []
    return [f"faults    {view['stats']['faults']}{_a_second(view['faults_per_s'], '.0f')}"]


def _moved_per_s(view: Mapping[str, Any]) -> float:
    return float((view["in_bytes_per_s"] or 0.0) + (view["out_bytes_per_s"] or 0.0))


def _figures(stats: Mapping[str, int], rates: Mapping[str, float | None]) -> Iterator[str]:
    for name in _SUMMED:
        yield format_bytes(stats[name])
    for name in ("in_bytes_per_s", "out_bytes_per_s"):
        rate = rates[name]
        yield "-" if rate is None else format_bytes(round(rate))
    faults = rates["faults_per_s"]
    yield "-" if faults is None else f"{faults:.0f}"


def _columns(pid: str, *cells: str) -> str:
    *figures, program = cells
    return f"{pid:>8}" + "".join(f"{cell:>12}" for cell in figures) + f"  {program}"


def _largest(tags: Mapping[str, Mapping[str, int]]) -> list[tuple[str, Mapping[str, int]]]:
    shown = [(name, row) for name, row in tags.items() if row["blocks"]]
    return sorted(shown, key=lambda item: (-item[1]["bytes"], item[0]))


def _row(name: str, row: Mapping[str, int]) -> str:
    away = row["bytes"] - row["resident_bytes"]
    sizes = (format_bytes(count) for count in (row["bytes"], row["resident_bytes"], away))
    return f"{plain(name):<12}{row['blocks']:>8}" + "".join(f"{size:>14}" for size in sizes)


def _bar(count: int, limit: int) -> str:
    share = count / limit if limit else 0.0
    filled = min(_BAR, round(share * _BAR))
    bar = "#" * filled + "." * (_BAR - filled)
    return f"[{bar}] {format_bytes(count)} of {format_bytes(limit)} ({100 * share:.0f} %)"


def _host(stats: Mapping[str, int]) -> str:
    limit = stats["host_budget_bytes"]
    most = format_bytes(limit) if limit else "unlimited"
    return f"{format_bytes(stats['host_bytes'])} of {most}"


def _moved(total: int, rate: float | None) -> str:
    speed = "" if rate is None else f", {format_bytes(round(rate))}/s"
    return format_bytes(total) + speed


def _a_second(rate: float | None, form: str) -> str:
    return "" if rate is None else f", {rate:{form}} a second"


def _plan(share: float | None, stats: Mapping[str, int]) -> str:
    if share is None:
        return "no plan in use"
    total = stats["plan_hits"] + stats["plan_misses"]
    return f"{100 * share:.1f} % of ops as planned ({stats['plan_hits']} of {total} in total)"
