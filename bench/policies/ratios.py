"""Ratios of a row's figures to their lower bounds, and their mean."""

from __future__ import annotations

import math
from collections.abc import Iterable

from policies.study import Row


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean of values above 0; NaN for none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def floor_us(row: Row) -> float:
    """Return the best known floor: from the linear program, or in closed form."""
    return float(row["lp_floor_us"] if "lp_floor_us" in row else row["floor_us"])


def step_ratio(row: Row) -> float:
    """Step time over `floor_us`."""
    return float(row["step_us"] / floor_us(row))


def bytes_ratio(row: Row) -> float | None:
    """Bytes in over their bound; None where none are needed."""
    return row["bytes_in"] / row["bound_bytes_in"] if row["bound_bytes_in"] else None
