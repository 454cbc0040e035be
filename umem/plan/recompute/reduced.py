"""A smaller step with the same decisions in it, which a search can rewrite hundreds of times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...trace.step import Bools, Ints, StepTrace

_PARTS = 64  # into so many at least the time and the bytes of what is merged are cut


def reduced(step: StepTrace, forward: Bools, last_wanted: int) -> tuple[StepTrace, Bools]:
    """The step without small tensors, and with ops merged that make no difference.

    Ops behind the last one that wants a result of the forward pass, the optimizer's, are merged as
    far as their tensors are few; so are ops of backward that access small tensors only with the
    one after. Tensors keep their indices.

    Returns:
        The step, and [n'] which of its ops are of the forward pass.
    """
    group = _groups(step, forward, last_wanted)
    n = int(group[-1]) + 1
    large = step.large[step.access_tensor]
    tensor, write = step.access_tensor[large], step.access_write[large]
    op = group[step.access_op[large]]
    # One access a tensor and op: in order of appearance, a write if any of them is.
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
    )
    return made, forward[heads]


def _groups(step: StepTrace, forward: Bools, last_wanted: int) -> Ints:
    """[n] To which op of the smaller step each op belongs."""
    bytes_of = step.sum_of_accesses(np.where(step.large, step.bytes, 0)).tolist()
    most_us, most_bytes = step.compute_us / _PARTS, step.peak_bytes / _PARTS
    group, us, held, empty = [], 0.0, 0, False
    now = -1
    for op, (time, size, is_forward) in enumerate(
        zip(step.op_us.tolist(), bytes_of, forward.tolist(), strict=True)
    ):
        mergeable = not is_forward and op > 0 and not forward[op - 1]
        fits = op > last_wanted + 1 and us + time <= most_us and held + size <= most_bytes
        if mergeable and (empty or fits):
            us, held = us + time, held + size
        else:
            now, us, held = now + 1, time, size
        empty = held == 0
        group.append(now)
    return np.array(group, np.int64)
