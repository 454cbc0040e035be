"""The ladder's steps, and its verdict on a card's needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from support.benches import imports

from umem.base.units import GIB


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, as its script has it."""
    for imported in imports(monkeypatch, "policies"):
        yield imported("ladder")


def row(rung: str, card: int, peak: float, ratio: float | None) -> dict[str, Any]:
    return {
        "rung": rung, "card_gib": card, "peak": int(peak * GIB), "images": 4, "compute_us": 1000.0,
        "fits": peak <= card, "step_us": None if ratio is None else 1000.0 * ratio,
    }  # fmt: skip


@pytest.mark.nightly
def test_each_rung_is_recorded_and_planned(ladder: Any) -> None:
    rungs = [ladder.LADDER[0], *ladder.LADDER[-2:]]
    rows = [row for rung in rungs for row in ladder.measured(rung, ladder.SMALL, [1])]
    whole, parts, stateless = (row["peak"] for row in rows)
    assert whole > parts > stateless
    assert [row["images"] for row in rows] == [64, 16, 16]
    assert all(row["fits"] for row in rows)
    assert all(row["step_us"] <= 1.001 * row["compute_us"] for row in rows)


def test_what_a_card_needs_and_what_is_saved(ladder: Any) -> None:
    ratios = {2: (None, 1.2, 1.0, 1.0), 1: (None, 1.3, None, 2.0)}
    rows = [
        row(rung, card, peak, ratio)
        for card, of_card in ratios.items()
        for rung, peak, ratio in zip("abcd", (9.0, 5.0, 3.0, 2.0), of_card, strict=True)
    ]
    page = ladder.report(rows, [2, 1])
    text = "\n".join(page.sections)
    assert "| 2 GiB | d | b | c, d |" in text
    assert "| 1 GiB | nothing fits | none below 1.25 x | - |" in text
    assert "| b | 5 GiB | 0.25 | 1.20 | 1.30 |" in text
    assert "| d | 2 GiB | 0.25 | fits | 2.00 |" in text
