"""The comparison with published peaks: each large difference has its reason, and docs have it."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEWEST = max((ROOT / "bench" / "results").glob("published_fake-tensors_*.json"))
ROWS = json.loads(NEWEST.read_text("utf-8"))["rows"]


def test_each_large_difference_has_a_reason() -> None:
    assert len(ROWS) >= 12
    assert not [row["model"] for row in ROWS if abs(row["ratio"] - 1) > 0.1 and not row["reason"]]


def test_the_page_has_the_newest_table() -> None:
    page = (ROOT / "docs" / "planning_models.md").read_text("utf-8")
    report = NEWEST.with_suffix(".md").read_text("utf-8")
    assert NEWEST.with_suffix(".md").name in page
    shown = [line for line in page.splitlines() if line.endswith("] |")]
    assert len(shown) == len(ROWS)
    assert shown == [line for line in report.splitlines() if line.endswith("] |")]
