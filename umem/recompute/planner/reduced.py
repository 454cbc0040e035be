"""Reduced steps: smaller ones with the same decisions, for hundreds of rewrites."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...trace.step_trace import Bools, Ints, StepTrace

_PARTS = 64  # a merged op has at most 1/_PARTS of the step's time and of its peak bytes


def reduced(step: StepTrace, forward: Bools, last_wanted: int) -> tuple[StepTrace, Bools]:
    """Return the step without small tensors, and with insignificant ops merged.

    Ops after the last one that needs a result of the forward pass, which are the optimizer's, are
    merged while their time and bytes are small. Ops of backward that access only small tensors are
    merged with the next op. Tensors keep their indices.

    Returns:
        The reduced step, and whether each of its ops belongs to the forward pass, [n'].
    """
    group = _groups(step, forward, last_wanted)
    n = int(group[-1]) + 1
    large = step.large[step.access_tensor]
    tensor, write = step.access_tensor[large], step.access_write[large]
    op = group[step.access_op[large]]
    # One access per tensor and op, in order of appearance. It writes if any of them does, and has
    # the needs of the first.
    key = op * step.n_tensors + tensor
    unique, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    order = np.lexsort((first, op[first]))
    written = np.zeros(len(unique), bool)
    np.logical_or.at(written, inverse, write)
    heads = np.searchsorted(group, np.arange(n))
    small = step.bytes * step.large
    made = replace(
        step,
        op_us=np.bincount(group, weights=step.op_us, minlength=n).astype(np.float64),
        op_names=tuple(step.op_names[i] for i in heads.tolist()),
        bytes=small,
        first=group[step.first],
        last=group[step.last],
        access_start=np.concatenate(([0], np.cumsum(np.bincount(op[first], minlength=n)))),
        access_tensor=tensor[first][order],
        access_write=written[order],
        access_read=None if step.access_read is None else step.access_read[large][first][order],
        # A merged op accesses whole tensors: the search's estimate may be slightly high.
        access_part=None,
        parts=None,
    )
    return made, forward[heads]


def _groups(step: StepTrace, forward: Bools, last_wanted: int) -> Ints:
    """Return each op's op in the reduced step, [n]."""
    bytes_of = step.sum_of_accesses(np.where(step.large, step.bytes, 0)).tolist()
    max_us, max_bytes = step.compute_us / _PARTS, step.peak_bytes / _PARTS
    group, us, held, empty = [], 0.0, 0, False
    now = -1
    for op, (time, size, is_forward) in enumerate(
        zip(step.op_us.tolist(), bytes_of, forward.tolist(), strict=True)
    ):
        mergeable = not is_forward and op > 0 and not forward[op - 1]
        fits = op > last_wanted + 1 and us + time <= max_us and held + size <= max_bytes
        if mergeable and (empty or fits):
            us, held = us + time, held + size
        else:
            now, us, held = now + 1, time, size
        empty = held == 0
        group.append(now)
    return np.array(group, np.int64)
