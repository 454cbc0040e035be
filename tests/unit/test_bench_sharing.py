"""The bench of sharing: each allocator's memory for a step, and the report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.benches import imports
from support.steptraces import PAGE, Op, Tensor, step, training


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """bench/sharing.py, imported as it is run."""
    for load in imports(monkeypatch, "policies"):
        yield load("sharing")
        del sys.modules["sharing"]


def test_a_layout_holds_the_load_and_asks_nothing_of_the_driver(sharing: Any) -> None:
    trace = training(6)
    row = sharing.row("made", trace, trace.bytes)
    held = {h.allocator: h for h in row.held}
    assert row.asked == row.pages == trace.peak_bytes
    for name in ("umem, layout", "umem, layout, tight"):
        assert held[name].bytes == trace.peak_bytes
        assert held[name].calls == held[name].dropped == 0
    assert held["umem, no layout"].bytes > trace.peak_bytes
    assert held["umem, no layout, tight"].calls > 0
    assert held["umem, no layout, tight"].dropped > 0
    assert held["SmartPool alone"].bytes == trace.peak_bytes


def test_requests_free_everything_once(sharing: Any) -> None:
    tensors = [Tensor(2), Tensor(1, (0, 1)), Tensor(3, (1, 1)), Tensor(1, (2, 2))]
    trace = step(tensors, [Op(writes=[1]), Op(writes=[2]), Op(writes=[3])])
    order = list(sharing.requests(trace))
    assert order == [(True, 1), (True, 2), (False, 1), (False, 2), (True, 3), (False, 3)]


def test_the_report_says_where_the_target_is_missed(sharing: Any) -> None:
    held = tuple(
        sharing.Held(name, size * PAGE, 100 * PAGE, 7) for name, size in (("umem, layout", 103),)
    )
    page = sharing.report([sharing.Row("made", 102 * PAGE, 100 * PAGE, 1.0, held)])
    units, asked = page.results
    assert (units.spread.median, units.reached) == (1.03, False)
    assert (round(asked.spread.median, 4), asked.reached) == (1.0098, True)
    assert "| made | 2.91% |" in page.markdown()
