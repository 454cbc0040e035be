"""The phases of a training step: forward, backward, optimizer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...trace.step_trace import Gaps, Ints, Kind, StepTrace
from ..base import Fetch
from ..default.occupancy import bytes_over, movable_gaps, select


class Phases(NamedTuple):
    """The first op of each phase after forward; n_ops where there is none (inference)."""

    backward: int
    optimizer: int


def phases(trace: StepTrace) -> Phases:
    """Find the phases by the ops' names and the tensors' tags; without either by idle bytes.

    Backward starts with the first op that is named so or writes a gradient, other than to zero it.
    If no op tells, it starts after the op over which the most bytes of transient tensors lie idle,
    because forward leaves its activations there for backward.
    """
    n = trace.n_ops
    named = [i for i, name in enumerate(trace.op_names) if "backward" in name.lower()]
    written = _ops_of(trace, "grad", written=True).tolist()
    made = [i for i in written if "zero" not in trace.op_names[i].lower()]
    told = [*named[:1], *made[:1]]
    backward = min(told, default=_turn(trace))
    updates = np.concatenate((_ops_of(trace, "optimizer"), _ops_of(trace, "param", written=True)))
    after = updates[updates >= backward]
    return Phases(backward, int(after.min(initial=n)))


def saved_for_backward(trace: StepTrace) -> Gaps:
    """Return the gaps of large transient tensors from the last use in forward to the next use."""
    turn = phases(trace).backward
    gaps = movable_gaps(trace)
    transient = trace.kind[gaps.tensor] == Kind.TRANSIENT
    across = np.flatnonzero(transient & (gaps.start < turn) & (gaps.end >= turn))
    return select(gaps, across[np.lexsort((gaps.tensor[across], gaps.start[across]))])


def fetch(trace: StepTrace, after: int, by: int, tensor: int) -> Fetch:
    """Return the fetch, with its ops counted from the step in which it starts."""
    if after < trace.n_ops:
        return Fetch(after, by, tensor)
    return Fetch(after - trace.n_ops, by - trace.n_ops, tensor)


def _ops_of(trace: StepTrace, tag: str, *, written: bool = False) -> Ints:
    tagged = np.array([known == tag for known in trace.tags], bool)
    hit = tagged[trace.access_tensor]
    return trace.access_op[hit & trace.access_write if written else hit]


def _turn(trace: StepTrace) -> int:
    gaps = movable_gaps(trace)
    gaps = select(gaps, np.flatnonzero(trace.kind[gaps.tensor] == Kind.TRANSIENT))
    idle = bytes_over(gaps, trace.bytes[gaps.tensor], trace.n_ops)
    return int(idle.argmax()) + 1 if idle.any() else trace.n_ops
