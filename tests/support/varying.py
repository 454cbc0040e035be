"""Programs whose steps differ, with tensors that are large and cheap to compute with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

ROWS, COLUMNS = 512, 1024  # a tensor of 2 MiB

Step = Callable[[int], Tensor]


class Block(nn.Module):
    """Two products by elements, with the rows that the input has."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(ROWS, COLUMNS) * 0.1)
        self.b = nn.Parameter(torch.randn(ROWS, COLUMNS) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        copies = -(-len(x) // ROWS)
        a, b = (w.repeat(copies, 1)[: len(x)] for w in (self.a, self.b))
        return x + torch.sin(torch.tanh(x * a) * b)


def _stack(count: int) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


def _run(blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x.square().mean()


def _x(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, COLUMNS)


def _trained(parameters: Any, loss: Step) -> Step:
    optimizer = torch.optim.Adam(parameters)

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        found = loss(i)
        found.backward()
        optimizer.step()
        return found

    return step


def branches() -> Step:
    """Leave out each block with a chance of 30 %."""
    net, x, rng = _stack(6), _x(), random.Random(3)

    def loss(_: int) -> Tensor:
        return _run([block for block in net if rng.random() > 0.3] or [net[0]], x)

    return _trained(net.parameters(), loss)


def early_exit() -> Step:
    """End after a third, two thirds or all of the blocks."""
    net, x, rng = _stack(6), _x(), random.Random(3)
    return _trained(net.parameters(), lambda _: _run(net[: rng.choice((2, 4, 6))], x))


def buckets() -> Step:
    """Three lengths in turn."""
    net, xs = _stack(4), [_x(copies * ROWS) for copies in (1, 2, 3)]
    return _trained(net.parameters(), lambda i: _run(net, xs[i % 3]))


def lengths() -> Step:
    """A length that hardly ever recurs."""
    net, rng = _stack(4), random.Random(3)

    def loss(_: int) -> Tensor:
        return _run(net, _x(rng.randrange(ROWS, 4 * ROWS)))

    return _trained(net.parameters(), loss)


def two_tasks() -> Step:
    """A body, and one of two heads in turn."""
    body, heads, x = _stack(4), [_stack(2), _stack(2)], _x()
    whole = nn.ModuleList([body, *heads])
    return _trained(whole.parameters(), lambda i: _run([*body, *heads[i % 2]], x))


def gan() -> Step:
    """Two networks, each with an optimizer; each step uses the results of the previous one."""
    generator, critic, x = _stack(4), _stack(3), _x()
    one, two = (torch.optim.Adam(net.parameters()) for net in (critic, generator))

    def step(_: int) -> Tensor:
        fake = x
        for block in generator:
            fake = block(fake)
        one.zero_grad()
        (_run(critic, fake.detach()) - _run(critic, x)).backward()
        one.step()
        two.zero_grad()
        found = _run(critic, fake)
        found.backward()
        two.step()
        return found

    return step


def evaluation() -> Step:
    """A forward pass without gradients after each third step."""
    net, x = _stack(6), _x()
    train = _trained(net.parameters(), lambda _: _run(net, x))

    def step(i: int) -> Tensor:
        found = train(i)
        if i % 3 == 2:
            with torch.no_grad():
                _run(net, x)
        return found

    return step


def by_hand() -> Step:
    """Update parameters without an optimizer; nothing marks a step's end."""
    net, x = _stack(6), _x()
    parameters = list(net.parameters())

    def step(_: int) -> Tensor:
        found = _run(net, x)
        with torch.no_grad():
            for p, gradient in zip(parameters, torch.autograd.grad(found, parameters), strict=True):
                p.sub_(gradient, alpha=0.01)
        return found

    return step


PROGRAMS: dict[str, Callable[[], Step]] = {
    made.__name__: made
    for made in (branches, early_exit, buckets, lengths, two_tasks, gan, evaluation, by_hand)
}
