"""Candidates for the results to drop: by checkpoints and cost, by published rules, by blocks."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...trace.step_trace import Bools, Floats, Ints
from .graph import RecomputeGraph

# Op categories whose results are expensive to rebuild; the others are cheap.
EXPENSIVE = ("conv", "linear", "attention", "loss", "embedding")


class Selection(NamedTuple):
    """Saved tensors to drop, temporaries to keep for rebuilding others, and copies to free early.

    A copy of a dropped tensor lives as long as it is needed; if it is in `free`, it is freed after
    each op of backward that it was rebuilt for, and rebuilt for the next one.
    """

    drop: Bools  # [m]
    keep: Bools  # [m]
    free: Bools  # [m]


class Checkpoints:
    """Cuts through the forward pass that are kept whole, with the tensors to drop between them.

    In each of `count` slices of equal saved bytes, the cut is the op after which later forward ops
    need the fewest bytes. Recomputation chains end there (Chen et al., "Training deep nets with
    sublinear memory cost", 2016).
    """

    def __init__(self, graph: RecomputeGraph, count: int) -> None:
        self.graph = graph
        self.cuts = _cuts(graph, count)
        self.keep: Bools = np.zeros(graph.step.n_tensors, bool)
        for op in self.cuts:
            self.keep[graph.flow(op)] = True

    @cached_property
    def order(self) -> Ints:
        """The droppable tensors between cuts, in ascending order of cost per byte."""
        tensors = np.flatnonzero(self.graph.droppable & ~self.keep)
        cost: Floats = self.graph.cost_per_byte(tensors, self.keep)
        return tensors[np.argsort(cost, kind="stable")]

    @cached_property
    def reached(self) -> Floats:
        """The cumulative share of the droppable bytes, in that order."""
        total = np.cumsum(self.graph.step.bytes[self.order])
        return total / max(int(total[-1]) if len(total) else 1, 1)

    def cheapest(self, share: float) -> Selection:
        """Drop the cheapest tensors, up to `share` of the droppable bytes."""
        drop: Bools = np.zeros(len(self.keep), bool)
        count = int(np.searchsorted(self.reached, share + 1e-9, side="right"))
        drop[self.order[:count]] = True
        return Selection(drop, self.keep, np.zeros_like(drop))


def cheap(graph: RecomputeGraph) -> Selection:
    """Drop results of norms, activation functions and the like; keep products, which swap."""
    others = np.array([family not in EXPENSIVE for family in graph.step.families], bool)
    nothing: Bools = np.zeros(len(others), bool)
    return Selection(graph.droppable & others, nothing, nothing)


def per_block(graph: RecomputeGraph) -> Selection:
    """Drop all tensors except the inputs of blocks.

    A block begins where the rest of the forward pass depends on a single tensor that several ops
    read, such as the sum in a residual network. With fewer than two such places, blocks begin at
    checkpoints, as many as the square root of the number of droppable tensors.
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
    return Selection(graph.droppable & ~keep, keep, np.zeros_like(keep))


def _cuts(graph: RecomputeGraph, count: int) -> list[int]:
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
