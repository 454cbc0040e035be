"""The link that `umem plan` advises."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from support.steptraces import LINK, PAGE, Op, Tensor, step

from umem.analysis import summary

# Two tensors by turns; within a budget of one, each has to leave for the other.
TWO = step([Tensor(4), Tensor(4)], [Op(reads=[t], us=1000.0) for t in (0, 1, 0, 1)])
ONE = 4 * PAGE


def advised(bytes_per_us_in: float, bytes_per_us_out: float, budget: int = ONE) -> bool:
    """Return whether another link is advised to a step that takes 1.26 times its compute."""
    found: Any = SimpleNamespace(
        peak_bytes=2 * ONE, by_tag={}, largest_op=SimpleNamespace(name=""), largest_op_bytes=0
    )
    device = replace(LINK, bytes_per_us_in=bytes_per_us_in, bytes_per_us_out=bytes_per_us_out)
    return any("a link of" in text for text in summary.advice(found, TWO, device, budget, 1.26))


def test_the_slower_way_of_a_link_decides() -> None:
    hides = summary.link_that_hides(TWO, LINK, ONE)
    assert hides is not None
    fast, slow = 2e3 * hides, 5e2 * hides
    assert not advised(fast, fast)
    assert advised(fast, slow)
    assert advised(slow, fast)


def test_no_link_is_advised_where_nothing_has_to_move() -> None:
    """The floor is compute at any rate, and the best schedule takes longer for another reason."""
    assert summary.link_that_hides(TWO, LINK, 2 * ONE) is None
    assert not advised(1.0, 1.0, 2 * ONE - 1)
