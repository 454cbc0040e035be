"""The lower bound in the answers of `umem plan`."""

from __future__ import annotations

import sys

import pytest
from support.steptraces import LINK, PAGE, Op, Tensor, step

from umem.cli.plan_bound import bound
from umem.recompute.planner.graph import RecomputeGraph


def graph() -> RecomputeGraph:
    """A step in which up to 4 pages live, and each op uses up to 3."""
    tensors = [Tensor(2, (0, 3)), Tensor(2, (1, 2)), Tensor(1, (2, 2))]
    ops = [Op("a", [], [0]), Op("b", [], [1]), Op("c", [1], [2]), Op("d", [0])]
    return RecomputeGraph(step(tensors, ops))


def test_a_bound_is_a_multiple_of_compute() -> None:
    pytest.importorskip("highspy")
    found = bound(graph(), LINK, 8 * PAGE)
    assert found.us == pytest.approx(400)
    assert found.why_not is None
    assert found.text(400.0) == "1.00 x compute, by a linear program"


def test_a_step_that_cannot_fit_has_none_and_says_why() -> None:
    pytest.importorskip("highspy")
    found = bound(graph(), LINK, 2 * PAGE)
    assert found.us is None
    assert found.text(300.0).startswith("not computed: op 2 (c) accesses ")


def test_without_highspy_it_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    found = bound(graph(), LINK, 4 * PAGE)
    assert found.us is None
    assert found.why_not is not None
    assert "umem[bounds]" in found.why_not
