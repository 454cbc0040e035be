"""Programs that train without an optimizer, or with several, have steps, without a line for it."""

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


def test_passes_that_are_traced_are_none() -> None:
    """torch.compile runs forward and backward passes on tensors without data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    weight = torch.ones(8, requires_grad=True)
    steps_of(20, weight)
    before = core.steps()
    with FakeTensorMode():
        for _ in range(20):
            fake = torch.ones(8, requires_grad=True)
            (fake * 2).sum().backward()
    assert core.steps() == before
    backward(weight)
    assert core.steps() == before + 1


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it
def test_a_step_that_compiles_many_graphs_is_one() -> None:
    torch._dynamo.reset()
    layers = [torch.nn.Linear(8 + i, 9 + i) for i in range(12)]
    compiled = [torch.compile(layer, backend="aot_eager") for layer in layers]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)

    def train() -> None:
        x = torch.ones(4, 8)
        for layer in compiled:
            x = layer(x)
        x.sum().backward()
        optimizer.step()

    marks = []
    with torch._dynamo.config.patch(recompile_limit=32):
        for _ in range(3):
            before = core.steps()
            train()
            marks.append(core.steps() - before)
    torch._dynamo.reset()  # for other tests
    assert marks == [1, 1, 1]


def test_functional_gradients_have_steps() -> None:
    gradient = torch.func.grad(lambda w: (w * 2).square().sum())
    before = core.steps()
    for _ in range(3 * PATIENCE):
        gradient(torch.ones(8))
    assert core.steps() - before >= PATIENCE


def train(weights: list[torch.Tensor], optimizers: list[torch.optim.Optimizer]) -> int:
    """Return the number of steps that one iteration ended, up to the last optimizer's step."""
    before = core.steps()
    torch.stack([(weight * 2).sum() for weight in weights]).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return core.steps() - before


def with_optimizers(count: int) -> tuple[list[torch.Tensor], list[torch.optim.Optimizer]]:
    weights = [torch.ones(8, requires_grad=True) for _ in range(count)]
    return weights, [torch.optim.SGD([weight], lr=0.1) for weight in weights]


@pytest.mark.parametrize("count", [1, 2, 12])
def test_several_optimizers_are_in_one_step(count: int) -> None:
    weights, optimizers = with_optimizers(count)
    counts = [train(weights, optimizers) for _ in range(5)]
    assert counts[1:] == [1, 1, 1, 1]


def test_a_step_ends_with_the_last_of_them() -> None:
    weights, optimizers = with_optimizers(3)
    train(weights, optimizers)
    (weights[0] * 2).sum().backward()
    marks = []
    for optimizer in optimizers:
        before = core.steps()
        optimizer.step()
        marks.append(core.steps() - before)
    assert marks == [0, 0, 1]


def test_fewer_of_them_end_a_step_at_the_next_forward_pass() -> None:
    weights, optimizers = with_optimizers(3)
    for _ in range(2):
        train(weights, optimizers)
    assert train(weights, optimizers[:2]) == 0
    before = core.steps()
    torch.ones(8).add_(1)
    assert core.steps() == before
    weights[0] * 2
    assert core.steps() == before + 1
    assert [train(weights, optimizers[:2]) for _ in range(3)] == [1, 1, 1]  # it is what is usual
    assert [train(weights, optimizers) for _ in range(3)] == [1, 2, 1]  # and is again


def test_an_optimizer_in_the_backward_pass_is_in_one_step() -> None:
    weights, optimizers = with_optimizers(6)
    handles = [
        weight.register_post_accumulate_grad_hook(lambda _, update=optimizer: update.step())
        for weight, optimizer in zip(weights, optimizers, strict=True)
    ]
    counts = [train(weights, []) for _ in range(5)]
    for handle in handles:
        handle.remove()
    assert counts[1:] == [1, 1, 1, 1]


def test_optimizers_of_two_losses_take_turns() -> None:
    (one, other), (first, second) = with_optimizers(2)
    counts = [train([one], [first]) + train([other], [second]) for _ in range(5)]
    assert counts == [2, 2, 2, 2, 2]


def test_steps_end_though_forward_passes_are_seen_no_more() -> None:
    weights, optimizers = with_optimizers(3)
    for _ in range(3):
        train(weights, optimizers)
    before = core.steps()
    for _ in range(40):  # as with gradients that are computed by hand
        optimizers[0].step()
    assert core.steps() - before >= 40 - 3 * 2 - PATIENCE


def test_a_program_that_says_where_its_steps_end_is_believed() -> None:
    weights, optimizers = with_optimizers(2)
    umem.step()
    before = core.steps()
    assert [train(weights, optimizers) for _ in range(3)] == [0, 0, 0]
    for _ in range(3 * PATIENCE):
        backward(weights[0])
    module = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for _ in range(3):
            module(torch.ones(2, 2))
    assert core.steps() == before
    umem.step()
    assert core.steps() == before + 1


@pytest.mark.parametrize("alive", [False, True], ids=["closed", "with a tensor alive"])
def test_the_next_session_guesses_again(alive: bool) -> None:
    kept = torch.empty(1 << 20) if alive else None
    umem.step()
    umem.disable()
    with umem.enable(budget="64MiB", device="soft"):
        weights, optimizers = with_optimizers(1)
        assert train(weights, optimizers) == 1
    del kept


class NamedBackward(torch.autograd.Function):
    """A function with Backward in its name, like FSDP2's that runs in each forward."""

    @staticmethod
    def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_functions_named_after_the_backward_pass_are_of_the_forward_pass() -> None:
    weight = torch.ones(8, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    counts = []
    for _ in range(3):
        before = core.steps()
        x = weight
        for _ in range(3 * PATIENCE):
            x = NamedBackward.apply(x) + 1
        x.sum().backward()
        optimizer.step()
        counts.append(core.steps() - before)
    assert counts == [1, 1, 1]
