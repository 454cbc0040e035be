"""Which results to drop: by checkpoints and cost, by rules of published systems, by blocks."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...trace.step import Bools, Floats, Ints
from .graph import Graph

# What each op's result costs little to make again; a hybrid swaps the rest.
DEAR = ("conv", "linear", "attention", "rnn", "loss", "embedding")


class Selection(NamedTuple):
    """Saved tensors to drop, and temporaries that are kept to make others from."""

    drop: Bools  # [m]
    keep: Bools  # [m]


class Checkpoints:
    """A number of cuts through the forward pass that are kept whole, and what is dropped between.

    Of each of `count` slices of equal saved bytes the cut is the op after which later forward ops
    need the fewest bytes. Chains of recomputation stop there (Chen et al., "Training deep nets with
    sublinear memory cost", 2016).
    """

    def __init__(self, graph: Graph, count: int) -> None:
        self.graph = graph
        self.cuts = _cuts(graph, count)
        self.keep: Bools = np.zeros(graph.step.n_tensors, bool)
        for op in self.cuts:
            self.keep[graph.flow(op)] = True

    @cached_property
    def order(self) -> Ints:
        """What may be dropped, the cheapest a byte first."""
        tensors = np.flatnonzero(self.graph.droppable & ~self.keep)
        cost: Floats = self.graph.cost_per_byte(tensors, self.keep)
        return tensors[np.argsort(cost, kind="stable")]

    @cached_property
    def reached(self) -> Floats:
        """The share of the droppable bytes up to each of `order`."""
        total = np.cumsum(self.graph.step.bytes[self.order])
        return total / max(int(total[-1]) if len(total) else 1, 1)

    def cheapest(self, share: float) -> Selection:
        """Drop the cheapest tensors, up to that share of the bytes that may be."""
        drop: Bools = np.zeros(len(self.keep), bool)
        count = int(np.searchsorted(self.reached, share + 1e-9, side="right"))
        drop[self.order[:count]] = True
        return Selection(drop, self.keep)


def hybrid(graph: Graph) -> Selection:
    """Drop what norms, activation functions and the like make; keep products, which swap."""
    cheap = np.array([family not in DEAR for family in graph.step.families], bool)
    return Selection(graph.droppable & cheap, np.zeros(len(cheap), bool))


def per_block(graph: Graph) -> Selection:
    """Drop all but the inputs of blocks.

    A block begins where one tensor alone carries the forward pass on and several ops read it, as
    the sum in a residual network; where that is nowhere, at as many checkpoints as the root of the
    count of tensors to drop.
    """
    step, flow = graph.step, graph.flow_bytes()
    readers = np.zeros(step.n_tensors, np.int64)
    for values in graph.inputs:
        readers[[graph.tensor_of[value] for value in values]] += 1
    keep: Bools = np.zeros(step.n_tensors, bool)
    for op in np.flatnonzero(graph.forward & (flow > 0)).tolist():
        carried = graph.flow(op)
        if len(carried) == 1 and readers[carried[0]] > 1:
            keep[carried] = True
    if keep.sum() < 2:
        keep = Checkpoints(graph, round(float(graph.droppable.sum()) ** 0.5)).keep
    return Selection(graph.droppable & ~keep, keep)


def _cuts(graph: Graph, count: int) -> list[int]:
    step = graph.step
    if not count:
        return []
    saved = np.flatnonzero(graph.saved & step.large)
    made = np.zeros(step.n_ops, np.int64)
    np.add.at(made, step.first[saved], step.bytes[saved])
    total = np.cumsum(made)
    edges = np.searchsorted(total, total[-1] * np.arange(count + 1) / count)
    flow = graph.flow_bytes()
    flow[~graph.forward] = np.iinfo(np.int64).max
    cuts = []
    for begin, end in zip(edges.tolist(), edges[1:].tolist(), strict=False):
        if end > begin:
            cuts.append(begin + int(np.argmin(flow[begin:end])))
    return sorted(set(cuts))
