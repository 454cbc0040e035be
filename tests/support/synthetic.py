"""Small traces with known access patterns, for tests, and their files.

Each function of a pattern yields the events of whole steps. Sizes are requested bytes, times µs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from umem.trace.ids import BlockId, block_ids
from umem.trace.schema import Alloc, Event, Free, Header, Op, Step
from umem.trace.writer import Writer

SMALL = 4096  # a tensor of this size shares its page with others


def write(path: Path, events: Iterable[Event], device: str = "a100-pcie4") -> Path:
    """Write a trace to this file; return the file."""
    with Writer(path, Header(device, "test", "")) as writer:
        for event in events:
            writer.write(event)
    return path


def chain(n: int, size: int, *, us: float = 100.0, steps: int = 1) -> Iterator[Event]:
    """Yield a stack of n layers without weights: op i makes activation i from i-1; then the mirror.

    Forward op i touches {i-1, i}; backward the same in reverse order, where i is read last. With a
    capacity of C >= 2 tensors, LRU and the oracle both reload max(0, n * size - C).
    """
    ids = block_ids()
    for _ in range(steps):
        live: list[BlockId] = []
        for i in range(n):
            live.append(next(ids))
            yield Alloc(live[i], size, "activation", "linear")
            yield Op("forward", tuple(live[-2:-1]), (live[i],), us, index=i, family="linear")
        for i in reversed(range(n)):
            yield Op("backward", tuple(live[-2:]), (), us, index=2 * n - 1 - i, family="linear")
            yield Free(live.pop())
        yield Step()


def cyclic(n: int, passes: int, size: int, *, us: float = 100.0) -> Iterator[Event]:
    """Yield n persistent tensors, each read by one op, in the same order in each step."""
    weights = [*islice(block_ids(), n)]
    for weight in weights:
        yield Alloc(weight, size, "param", "linear")
    for _ in range(passes):
        for i, weight in enumerate(weights):
            yield Op("use", (weight,), (), us, index=i, family="linear")
        yield Step()


def training(
    layers: int,
    weight: int,
    activation: int,
    iterations: int = 1,
    *,
    us: float = 100.0,
    small: int = 0,
    optimizer: bool = False,
) -> Iterator[Event]:
    """Yield a stack with weights: op i touches act(i-1), act(i) and w(i); backward mirrored.

    Args:
        layers: number of layers.
        weight: bytes of one layer's weight; they persist.
        activation: bytes of one layer's output; new in each iteration.
        iterations: number of steps.
        us: time of a forward op; a backward op takes twice as long, an update half.
        small: small persistent tensors of each layer (biases, statistics), read with its weight.
        optimizer: whether backward makes gradients, which live until the next step's first
            backward op as with `zero_grad(set_to_none=True)`, and a momentum update follows.
    """
    ids = block_ids()
    weights = [next(ids) for _ in range(layers)]
    biases = [[next(ids) for _ in range(small)] for _ in range(layers)]
    momenta = [next(ids) for _ in range(layers)] if optimizer else []
    yield from (Alloc(i, weight, "param", "linear") for i in weights)
    yield from (Alloc(i, SMALL, "param", "norm") for of_layer in biases for i in of_layer)
    yield from (Alloc(i, weight, "optimizer", "optimizer") for i in momenta)
    grads: list[BlockId] = []
    for _ in range(iterations):
        acts: list[BlockId] = []
        for i in range(layers):
            acts.append(next(ids))
            yield Alloc(acts[i], activation, "activation", "linear")
            reads = (*acts[-2:-1], weights[i], *biases[i])
            yield Op("forward", reads, (acts[i],), us, family="linear")
        yield from map(Free, grads)
        grads = []
        for i in reversed(range(layers)):
            made: tuple[BlockId, ...] = ()
            if optimizer:
                made = (next(ids),)
                grads.append(made[0])
                yield Alloc(made[0], weight, "grad", "linear")
            reads = (*acts[-2:], weights[i], *biases[i])
            yield Op("backward", reads, made, 2 * us, family="linear")
            yield Free(acts.pop())
        for grad, w, m in zip(reversed(grads), weights, momenta, strict=bool(optimizer)):
            yield Op("update", (grad, w, m), (w, m), us / 2, family="optimizer")
        yield Step()


def random_trace(
    seed: int, *, ops: int = 40, steps: int = 3, most: int = 24 << 20
) -> Iterator[Event]:
    """Yield a valid trace with every kind of event and lifetime, the same for the same seed.

    Each step is another shuffle, except for the ids that persist. It includes tensors that cross a
    step's end, scratch blocks, in-place ops, ops without accesses or without a time, one tensor
    named twice, blocks without bytes, and ids reused after their free.
    """
    draw = random.Random(seed)  # no secret
    state = _Random(draw, most)
    yield from (state.alloc(tag) for tag in ("param", "param", "optimizer", "input"))
    yield Alloc(state.anchor, SMALL, "param")
    state.kept = set(state.live)
    for _ in range(steps):
        anchored = draw.randrange(ops)  # so that each step has an op that accesses memory
        for index in range(ops):
            yield from state.op(index, (state.anchor,) if index == anchored else ())
            if draw.random() < 0.5:
                yield from state.free(draw.randrange(4))
        yield Step()


class _Random:
    def __init__(self, draw: random.Random, most: int) -> None:
        self._draw = draw
        self._most = most
        self._used: list[BlockId] = []  # ids that are free for reuse
        self._next = block_ids()
        self.anchor = next(self._next)
        self.live: list[BlockId] = []
        self.kept: set[BlockId] = set()

    def alloc(self, tag: str) -> Alloc:
        reuse = self._used and self._draw.random() < 0.3
        block = self._used.pop() if reuse else next(self._next)
        self.live.append(block)
        size = self._draw.choice((0, 1, 256, 70_000, 2 << 20, 5_000_000, self._most))
        return Alloc(block, self._draw.randint(0, size), tag, self._draw.choice(("", "conv")))

    def op(self, index: int, more: tuple[BlockId, ...]) -> Iterable[Event]:
        draw = self._draw
        reads = [*more, *draw.choices(self.live, k=draw.randrange(4))]
        writes = [block for block in reads if draw.random() < 0.2]
        for _ in range(draw.randrange(3)):
            made = self.alloc(draw.choice(("activation", "grad", "temp", "")))
            writes.append(made.id)
            yield made
        if draw.random() < 0.2:
            scratch = self.alloc("workspace")
            yield scratch
            yield self._drop(scratch.id)
        us = draw.choice((None, 0.0, draw.uniform(0, 1000)))
        name = draw.choice(("aten::mm", "aten::add_", "aten::convolution"))
        yield Op(name, tuple(reads), tuple(writes), us, index=index)

    def free(self, most: int) -> Iterable[Event]:
        free = [block for block in self.live if block not in self.kept]
        for block in self._draw.sample(free, min(most, len(free))):
            yield self._drop(block)

    def _drop(self, block: BlockId) -> Free:
        self.live.remove(block)
        self._used.append(block)
        return Free(block)
