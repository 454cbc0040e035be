"""Programs that train without an optimizer have steps, without a line for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402

PATIENCE = 8  # backward passes in no marked step, after which each ends one


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    with umem.enable(budget="64MiB", device="soft"):
        yield


def backward(weight: torch.Tensor) -> None:
    weight.grad = None
    (weight * 2).sum().backward()
    with torch.no_grad():
        weight.sub_(weight.grad)


def steps_of(passes: int, weight: torch.Tensor) -> list[int]:
    marks = []
    for _ in range(passes):
        before = core.steps()
        backward(weight)
        marks.append(core.steps() - before)
    return marks


def test_after_some_passes_each_forward_pass_begins_a_step() -> None:
    marks = steps_of(20, torch.ones(8, requires_grad=True))
    assert marks == [0] * (PATIENCE + 1) + [1] * (19 - PATIENCE)


def test_what_the_program_does_to_its_parameters_belongs_to_the_step() -> None:
    weight = torch.ones(8, requires_grad=True)
    steps_of(20, weight)
    before = core.steps()
    with torch.no_grad():
        weight.mul_(2)
    torch.ones(8).add_(1)
    assert core.steps() == before
    weight * 2
    assert core.steps() == before + 1


def test_gradients_that_an_optimizer_takes_begin_none() -> None:
    weight = torch.ones(8, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3 * PATIENCE):
        before = core.steps()
        for _ in range(3):
            (weight * 2).sum().backward()
        optimizer.step()
        assert core.steps() == before + 1


def test_long_accumulation_is_split_in_its_first_step_only() -> None:
    weight = torch.ones(8, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    counts = []
    for _ in range(4):
        before = core.steps()
        for _ in range(3 * PATIENCE):
            (weight * 2).sum().backward()
        optimizer.step()
        counts.append(core.steps() - before)
    assert counts[0] > 1
    assert counts[1:] == [1, 1, 1]


def test_a_recomputed_forward_pass_begins_none() -> None:
    from torch.utils.checkpoint import checkpoint

    weight = torch.ones(8, requires_grad=True)
    steps_of(20, weight)
    before = core.steps()
    loss = checkpoint(lambda w: (w * 2).sin(), weight, use_reentrant=False).sum()
    assert core.steps() == before + 1
    loss.backward()
    assert core.steps() == before + 1


def test_functional_gradients_have_steps() -> None:
    gradient = torch.func.grad(lambda w: (w * 2).square().sum())
    before = core.steps()
    for _ in range(3 * PATIENCE):
        gradient(torch.ones(8))
    assert core.steps() - before >= PATIENCE
