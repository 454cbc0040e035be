"""The demo's table as text."""

from __future__ import annotations

from collections.abc import Sequence

from umem.base.units import MIB

from .runner import DemoRow

HEADER = (
    ("", "workload"),
    ("", "memory"),
    ("", "policy"),
    ("peak", "MiB"),
    ("budget", "MiB"),
    ("peak resident", "MiB"),
    ("", "identical"),
    ("faults", "per step"),
    ("in MiB", "per step"),
    ("out MiB", "per step"),
    ("MiB avoided", "per step"),
    ("ms", "per step"),
    ("plain ms", "around it"),
    ("time", "ratio"),
)
_LEFT = 3  # the first columns are text


def render(rows: Sequence[DemoRow]) -> str:
    """Format one line per run, then the reason of each run without figures."""
    top, second = zip(*HEADER, strict=True)
    cells = [list(top), list(second), *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADER))]
    lines = [_join(line, widths) for line in cells]
    rule = "-" * len(lines[0])
    parts: list[str] = lines[:2]
    previous = ""
    for row, line in zip(rows, lines[2:], strict=True):
        if row.workload != previous:
            parts.append(rule)
            previous = row.workload
        parts.append(line)
    notes = [f"{_name(row)}: {row.problem}" for row in rows if row.problem is not None]
    return "\n".join([*parts, rule, *notes])


def columns(rows: Sequence[DemoRow]) -> list[list[str]]:
    """Return the heads of the columns, and then the cells of each run."""
    heads = [" ".join(part for part in parts if part) for parts in HEADER]
    return [heads, *map(_cells, rows)]


def brief(row: DemoRow) -> str:
    """Format a run in a few words, for the progress."""
    if row.problem is not None:
        return "failed: " + row.problem.splitlines()[0]
    words = [f"{row.step_ms:.0f} ms per step", f"{row.ratio:.2f}x"]
    if row.fraction:
        words.append("identical" if row.identical else "NOT IDENTICAL")
        if not row.within_budget:
            words.append("OVER BUDGET")
    return ", ".join(words)


def _name(row: DemoRow) -> str:
    return f"{row.workload}, {_memory(row)}, {row.policy}"


def _memory(row: DemoRow) -> str:
    return {0: "-", 1: "all fits"}.get(row.fraction, f"1/{row.fraction}")


def _cells(row: DemoRow) -> list[str]:
    return [
        row.workload,
        _memory(row),
        row.policy,
        _mib(row.peak_bytes),
        _mib(row.budget_bytes),
        _mib(row.peak_resident_bytes) + ("" if row.within_budget else " OVER"),
        _identical(row),
        _number(row.faults_per_step, ".0f"),
        _mib(row.in_per_step),
        _mib(row.out_per_step),
        _mib(row.discarded_per_step),
        _number(row.step_ms, ".0f"),
        _number(row.plain_ms, ".0f"),
        "-" if row.ratio is None else f"{row.ratio:.2f}x",
    ]


def _identical(row: DemoRow) -> str:
    if row.fraction == 0:
        return "reference"
    if row.problem is not None:
        return "FAILED"
    return "yes" if row.identical else "NO"


def _mib(size: float | None) -> str:
    return "-" if size is None else f"{size / MIB:.0f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _join(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [
        cell.ljust(width) if i < _LEFT else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(aligned).rstrip()
