"""The demo's figures as text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from umem.base.text_table import aligned
from umem.base.units import MIB

from .runner import DemoRow


def _mib(size: float | None) -> str:
    return _number(None if size is None else size / MIB)


def _number(value: float | None, form: str = ".0f", unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit


def _memory(row: DemoRow) -> str:
    return {0: "-", 1: "all fits"}.get(row.fraction, f"1/{row.fraction}")


def _identical(row: DemoRow) -> str:
    if row.fraction == 0:
        return "reference"
    return "FAILED" if row.problem is not None else "yes" if row.identical else "NO"


def _resident(row: DemoRow) -> str:
    return _mib(row.peak_resident_bytes) + ("" if row.within_budget else " OVER")


_COLUMNS: tuple[tuple[str, str, Callable[[DemoRow], str]], ...] = (
    ("", "workload", lambda row: row.workload),
    ("", "memory", _memory),
    ("", "policy", lambda row: row.policy),
    ("peak", "MiB", lambda row: _mib(row.peak_bytes)),
    ("budget", "MiB", lambda row: _mib(row.budget_bytes)),
    ("peak resident", "MiB", _resident),
    ("", "identical", _identical),
    ("faults", "per step", lambda row: _number(row.faults_per_step)),
    ("in MiB", "per step", lambda row: _mib(row.in_per_step)),
    ("out MiB", "per step", lambda row: _mib(row.out_per_step)),
    ("MiB avoided", "per step", lambda row: _mib(row.discarded_per_step)),
    ("ms", "per step", lambda row: _number(row.step_ms)),
    ("plain ms", "around it", lambda row: _number(row.plain_ms)),
    ("time", "ratio", lambda row: _number(row.ratio, ".2f", "x")),
)
_WORDS = range(3)  # the columns of text


def render(rows: Sequence[DemoRow]) -> str:
    """Format one line per run, then the reason of each run without figures."""
    heads = [[column[0] for column in _COLUMNS], [column[1] for column in _COLUMNS]]
    head, second, *lines = aligned([*heads, *map(_cells, rows)], _WORDS)
    rule = "-" * len(head)
    parts = [head, second]
    for _, group in itertools.groupby(zip(rows, lines, strict=True), lambda pair: pair[0].workload):
        parts += [rule, *(line for _, line in group)]
    notes = [f"{title(row)}: {row.problem}" for row in rows if row.problem is not None]
    return "\n".join([*parts, rule, *notes])


def columns(rows: Sequence[DemoRow]) -> list[list[str]]:
    """Return the heads of the columns, and then the cells of each run."""
    heads = [f"{first} {second}".lstrip() for first, second, _ in _COLUMNS]
    return [heads, *map(_cells, rows)]


def title(row: DemoRow) -> str:
    """Return the name of a run."""
    return ", ".join((row.workload, row.policy, *([_memory(row)] if row.fraction else [])))


def brief(row: DemoRow) -> str:
    """Format a run in a few words, for the progress."""
    if row.problem is not None:
        return f"{title(row)}: failed: {row.problem.splitlines()[0]}"
    words = [f"{row.step_ms:.0f} ms per step", f"{row.ratio:.2f}x"]
    if row.fraction:
        words.append("identical" if row.identical else "NOT IDENTICAL")
        if not row.within_budget:
            words.append("OVER BUDGET")
    return f"{title(row)}: {', '.join(words)}"


def _cells(row: DemoRow) -> list[str]:
    return [cell(row) for _, _, cell in _COLUMNS]
