"""Random programs, with views and ops in place, under random plans: gradients never differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from support.recompute import names_of  # noqa: E402
from torch.nn import functional  # noqa: E402

from umem.recompute.executor.forward import Prepared, dropping  # noqa: E402
from umem.recompute.planner.plan import RecomputePlan  # noqa: E402

Op = Callable[[Any, Any], Any]


def _into(x: Any, y: Any) -> Any:
    held = torch.zeros(3, 4)
    held[0] = x[1]
    held[1:] = y[:2]
    return held


def _norm(x: Any, y: Any) -> Any:
    mean, var = torch.zeros(4), torch.ones(4)
    out = functional.batch_norm(x, mean, var, training=True)
    return out + mean + y


OPS: dict[str, Op] = {
    "sin": lambda x, _: x.sin(),
    "tanh": lambda x, _: x.tanh(),
    "sigmoid": lambda x, _: x.sigmoid(),
    "mul": lambda x, y: x * y,
    "add": lambda x, y: x + 0.5 * y,
    "matmul": lambda x, y: (x @ y.t()) @ x / 4,
    "softmax": lambda x, _: x.softmax(-1),
    "layer_norm": lambda x, _: functional.layer_norm(x, (4,)),
    "batch_norm": _norm,
    "dropout": lambda x, _: functional.dropout(x, 0.4),
    "noise": lambda x, _: x + torch.randn(3, 4),
    "flip": lambda x, _: x.t().reshape(4, 3).t(),
    "cat": lambda x, y: torch.cat([x[:1], y[1:]]).sin(),
    "clone": lambda x, _: x.clone(),
    "into": _into,
    "max": lambda x, y: torch.maximum(x, y),
    "pool": lambda x, _: functional.max_pool1d(x.unsqueeze(0), 3, 1, 1)[0],
    "where": lambda x, y: torch.where(x > 0, x, y.tanh()),
    "relu_": lambda x, _: x.relu_(),
    "mul_": lambda x, y: x.mul_(y.detach().sigmoid()),
    "add_": lambda x, y: x.add_(y),
    "tanh_": lambda x, _: x.tanh_(),
    "dropout_": lambda x, _: functional.dropout(x, 0.4, inplace=True),
    "row_": lambda x, _: (x[1].mul_(0.5), x)[1],
    "column_": lambda x, y: (x[:, 2].copy_(y[:, 1]), x)[1],
    "fill_": lambda x, _: (x[2].fill_(0.25), x)[1],
    "parts": lambda x, _: torch.cat([part.sigmoid() for part in torch.unsafe_split(x, 2, 1)], 1),
    "data_": lambda x, y: (y.detach().mul_(0.9), x * 1)[1],
}
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 5), st.integers(0, 5)),
    min_size=1,
    max_size=14,
)


def run(program: list[tuple[str, int, int]], weights: list[Any], buffer: Any) -> Any:
    """The program's loss. Its tensors are the weights, a buffer, and each op's result."""
    pool = [weights[0] * 1, weights[1], buffer]
    for name, i, j in program:
        pool.append(OPS[name](pool[-1 - i % len(pool)], pool[-1 - j % len(pool)]))
    return sum(tensor.sin().sum() for tensor in pool)


def step(
    program: list[tuple[str, int, int]], forward: Callable[[Callable[[], Any]], Any]
) -> list[Any]:
    """The gradients, the buffer and the generator after a step."""
    torch.manual_seed(1)
    weights = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    buffer = torch.randn(3, 4)
    forward(lambda: run(program, weights, buffer)).backward()
    return [*(weight.grad for weight in weights), buffer, torch.get_rng_state()]


@settings(max_examples=300)
@given(PROGRAMS, st.randoms(use_true_random=False), st.sampled_from([0.0, 0.5, 1.0]))
def test_gradients_are_those_of_the_plain_run(
    program: list[tuple[str, int, int]], random: Any, freed: float
) -> None:
    names: list[str] = []

    def plainly(forward: Callable[[], Any]) -> Any:
        losses: list[Any] = []
        names.extend(names_of(lambda: losses.append(forward())))
        return losses[0]

    def dropped(forward: Callable[[], Any]) -> Any:
        share = random.choice([0.3, 0.7, 1.0])
        drop = tuple(i for i in range(len(names)) if random.random() < share)
        free = tuple(i for i in drop if random.random() < freed)
        with dropping(Prepared(RecomputePlan(tuple(names), drop, free))) as tally:
            loss = forward()
        assert tally.mismatch == ""
        return loss

    try:
        expected = step(program, plainly)
    except RuntimeError:
        return  # torch refuses it: a leaf is changed in place, or what backward needs
    found = step(program, dropped)
    for a, b in zip(expected, found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
