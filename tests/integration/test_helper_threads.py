"""Threads that only help, at another place of each step: no plan counts what they do."""

from __future__ import annotations

import functools
import gc
import queue
import threading
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from support.layers import Scale  # noqa: E402

import umem  # noqa: E402

SIDE, ROWS, STEPS = 1024, 512, 10
BUDGET = "60MiB"  # at a peak of 114 MiB


def batch(step: int) -> torch.Tensor:
    """Made by ops on large tensors, some of which are freed immediately."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, SIDE, generator=generator)
    return (x - x.mean()) / x.std()


def inline() -> Iterator[torch.Tensor]:
    yield from map(batch, range(STEPS))


def from_a_thread() -> Iterator[torch.Tensor]:
    """Up to two batches ahead."""
    made: queue.Queue[torch.Tensor] = queue.Queue(2)

    def make() -> None:
        for step in range(STEPS):
            made.put(batch(step))

    thread = threading.Thread(target=make)
    thread.start()
    for _ in range(STEPS):
        yield made.get()
    thread.join()


def beside_a_thread() -> Iterator[torch.Tensor]:
    """Another thread works on its own large tensors continuously."""
    stop = threading.Event()

    def work() -> None:
        mine = torch.ones(ROWS, SIDE)
        while not stop.is_set():
            mine = mine * 0.5 + torch.ones(ROWS, SIDE)

    thread = threading.Thread(target=work)
    thread.start()
    yield from map(batch, range(STEPS))
    stop.set()
    thread.join()


def train(batches: Callable[[], Iterator[torch.Tensor]]) -> tuple[list[float], list[float]]:
    """Each step's loss, and its share of ops that followed a plan."""
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (Scale(SIDE), torch.nn.ReLU())]
    net = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(net.parameters())
    losses, shares = [], []
    for x in batches():
        before = umem.stats()
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        now = umem.stats()
        hits = now.plan_hits - before.plan_hits
        misses = now.plan_misses - before.plan_misses
        shares.append(hits / max(hits + misses, 1))
    del net, optimizer, x, loss
    gc.collect()
    return losses, shares


@functools.cache
def plain() -> list[float]:
    """The losses without umem."""
    return train(inline)[0]


@pytest.mark.parametrize(
    "batches", [pytest.param(from_a_thread, marks=pytest.mark.nightly), beside_a_thread]
)
def test_a_plan_holds_beside_them(batches: Callable[[], Iterator[torch.Tensor]]) -> None:
    plain()
    with umem.enable(budget=BUDGET, device="soft"):
        losses, shares = train(batches)
    assert losses == plain()
    assert min(shares[6:]) >= 0.95
