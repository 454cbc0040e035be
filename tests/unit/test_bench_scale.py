"""The bench of many ranks: one rank of each size is traced, and its line has a node's needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from support.benches import imports


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, as its script has it."""
    for imported in imports(monkeypatch, "policies"):
        yield imported("scale")


@pytest.mark.nightly
def test_more_ranks_have_smaller_shards_and_a_line_each(scale: Any) -> None:
    (case,) = scale.SMALL
    rows = [scale.measured(case, ranks, budget=48 << 20) for ranks in (2, 8)]
    two, eight = rows
    assert two["shard"] > 3 * eight["shard"]
    assert two["peak"] > eight["peak"]
    assert (two["nodes"], eight["nodes"]) == (1, 2)
    assert eight["exchanged_bytes"] > two["exchanged_bytes"] > 0
    for row in rows:
        assert row["step_us"] >= row["alone_us"] >= 0.999 * row["compute_us"]
        assert row["host_bytes_node"] == min(row["ranks"], 4) * row["host_bytes_rank"]
    page = scale.report(rows)
    text = "\n".join(page.sections)
    assert "| small | 1 a100-pcie4x4 | 2 |" in text
    assert "| small | 2 a100-pcie4x4 | 8 |" in text
    assert [result.name for result in page.results] == [
        "small, 2 ranks on a100-pcie4x4: step / compute",
        "small, 8 ranks on a100-pcie4x4: step / compute",
    ]
