"""Stored form of a run: the report's figures, each case once.

All other figures of a replay remain in build/bench-policies, one file per workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies.study import Row

KEY = ("workload", "device", "fraction")
CASE = (
    "peak_bytes", "tensors", "ops", "budget", "compute_us", "floor_us", "lp_floor_us",
    "bound_bytes_in",
)  # fmt: skip
REPLAY = ("step_us", "bytes_in", "bytes_out", "plan_ms")


def of(rows: Sequence[Row]) -> dict[str, Any]:
    """For JSON: a list of figures by case and policy, or the error that there is instead.

    The floor of the linear program is there for some cases only.
    """
    cases: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        case = cases.setdefault(tuple(row[key] for key in KEY), {})
        case.update({key: _short(row[key]) for key in (*KEY, *CASE) if key in row})
        figures = [_short(row[key]) for key in REPLAY if key in row]
        case.setdefault("replays", {})[row["policy"]] = row.get("error", figures)
    return {"figures": list(REPLAY), "cases": list(cases.values())}


def rows(summary: dict[str, Any]) -> list[Row]:
    """Rebuild the rows as the report takes them."""
    return [
        _row({key: value for key, value in case.items() if key != "replays"}, policy, found)
        for case in summary["cases"]
        for policy, found in case["replays"].items()
    ]


def _row(case: dict[str, Any], policy: str, found: list[float] | str) -> Row:
    if isinstance(found, str):
        return {**case, "policy": policy, "error": found}
    return {**case, "policy": policy, **dict(zip(REPLAY, found, strict=False))}


def _short(value: Any) -> Any:
    """Seven digits of a time or a rate; bytes and counts as they are."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
