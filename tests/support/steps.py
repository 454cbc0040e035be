"""Steps for tests: built by hand, and random ones for hypothesis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from umem.base.units import MIB, PAGE_BYTES
from umem.trace.step_trace import Kind, StepTrace

OVER = "over"  # written whole


class Tensor(NamedTuple):
    """A tensor of a step: the ops that access it, and those that write it.

    It lives from its first access to its last one and as long as it is held, or to the step's
    boundary, according to its kind.
    """

    bytes: int
    uses: Mapping[int, bool | str]  # op -> whether it writes; OVER: it needs no former contents
    kind: Kind = Kind.TRANSIENT
    tag: str = "activation"
    family: str = "linear"
    next_alias: int = -1
    held: int = 0  # ops after the last one that accesses it


def make_step(op_us: Sequence[float], tensors: Sequence[Tensor]) -> StepTrace:
    """The step in columns. Ops are named op0, op1, ...; large is 2 MiB and more."""
    n = len(op_us)
    access = sorted((op, t, use) for t, row in enumerate(tensors) for op, use in row.uses.items())
    counts = np.bincount([op for op, _, _ in access], minlength=n) if access else np.zeros(n, int)
    lives = [_life(row, n) for row in tensors]
    return StepTrace(
        op_us=np.array(op_us, np.float64),
        op_names=tuple(f"op{i}" for i in range(n)),
        bytes=np.array([row.bytes for row in tensors], np.int64),
        large=np.array([row.bytes >= PAGE_BYTES for row in tensors], np.bool_),
        tags=tuple(row.tag for row in tensors),
        families=tuple(row.family for row in tensors),
        kind=np.array([row.kind for row in tensors], np.int64),
        first=np.array([first for first, _ in lives], np.int64),
        last=np.array([last for _, last in lives], np.int64),
        next_alias=np.array([row.next_alias for row in tensors], np.int64),
        source=np.arange(len(tensors), dtype=np.int64),
        access_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        access_tensor=np.array([t for _, t, _ in access], np.int64),
        access_write=np.array([bool(use) for _, _, use in access], np.bool_),
        access_read=np.array([use != OVER for _, _, use in access], np.bool_),
    )


def _life(row: Tensor, n: int) -> tuple[int, int]:
    first = min(row.uses, default=0)
    last = min(max(row.uses, default=n - 1) + row.held, n - 1)
    if row.kind in (Kind.PERSISTENT, Kind.CARRIED):
        first = 0
    if row.kind in (Kind.PERSISTENT, Kind.MADE):
        last = n - 1
    return first, last


def sequence(ops: Sequence[Sequence[int]], sizes: Sequence[int], us: float = 1.0) -> StepTrace:
    """A program that runs once: op i accesses the objects ops[i]; the first touch writes."""
    uses: list[dict[int, bool | str]] = [{} for _ in sizes]
    for i, objects in enumerate(ops):
        for t in objects:
            uses[t][i] = not uses[t]
    return make_step([us] * len(ops), [Tensor(b, u) for b, u in zip(sizes, uses, strict=True)])


@st.composite
def steps(draw: st.DrawFn, max_ops: int = 12, max_tensors: int = 10) -> StepTrace:
    """A random step: all kinds, large and small tensors, pairs of MADE and CARRIED ones."""
    n = draw(st.integers(1, max_ops))
    us = draw(st.lists(st.integers(1, 50), min_size=n, max_size=n))
    rows: list[Tensor] = []
    for _ in range(draw(st.integers(0, max_tensors))):
        kind = draw(st.sampled_from([Kind.TRANSIENT, Kind.TRANSIENT, Kind.PERSISTENT, Kind.MADE]))
        size = draw(st.sampled_from([256, MIB, 2 * MIB, 4 * MIB, 6 * MIB, 16 * MIB]))
        uses = draw(_uses(n, kind != Kind.PERSISTENT))
        tag = draw(st.sampled_from(["param", "optimizer"])) if kind == Kind.PERSISTENT else "grad"
        held = draw(st.sampled_from([0, 0, 1, 3]))
        rows.append(Tensor(size, uses, kind, tag, held=held))
        if kind == Kind.MADE and draw(st.booleans()):
            carried = draw(_uses(n, made_here=False))
            made = len(rows) - 1
            rows.append(Tensor(size, carried, Kind.CARRIED, tag, next_alias=made, held=held))
    return make_step([float(u) for u in us], rows)


@st.composite
def _uses(draw: st.DrawFn, n: int, made_here: bool) -> dict[int, bool | str]:
    ops = sorted(draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=4)))
    choices: list[bool | str] = [False, True, OVER]
    writes = [draw(st.sampled_from(choices)) for _ in ops]
    if made_here:
        writes[0] = True
    return dict(zip(ops, writes, strict=True))
