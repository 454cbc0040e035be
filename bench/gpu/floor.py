"""Closed-form lower bound on the time of a training step whose memory does not fit.

Derivation. Let an op t be the moment at which O_t bytes more than the capacity C are alive. They
are away while t runs. Those that this step made, or used before t, had to leave before t; those
that it uses after t have to come back after t. The two directions of the link cannot help each
other across t, so

    floor = max over t of  max(T_before, (O_t - P_t) / out)  +  max(T_after, (O_t - P2_t) / in)

with O_t = S_t + W_t - C; S_t the bytes whose reuse interval spans t (used before and after t, not
by t), W_t the working set of t, T the compute time before and after t, `in` and `out` the link's
bytes a second. Persistent tensors (weights, optimizer state) may have been away since before the
step began: P_t are those that span t, P2_t those of them that only the next step uses again. In the
steady state each step also needs its whole compute time and the bytes of its largest cut in each
direction; what a step does not write needs no way out.

Bytes are the tensors' own: what an allocator adds by rounding is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any


@dataclass(frozen=True)
class Op:
    """One op: how long it computes, and the tensors that it reads or writes, by number."""

    seconds: float
    tensors: frozenset[int]


@dataclass(frozen=True)
class Step:
    """One training step. `sizes` in bytes; persistent tensors outlive the step on both sides."""

    ops: tuple[Op, ...]
    sizes: Mapping[int, int]
    persistent: frozenset[int]
    written: frozenset[int]  # by this step

    @classmethod
    def of(cls, traced: Mapping[str, Any], step_seconds: float) -> Step:
        """Build a step from `trace.record`'s result, with op times scaled to a measured step."""
        times = [seconds for seconds, _ in traced["ops"]]
        total = sum(times)
        scale = step_seconds / total if total > 0 else 0.0
        alike = step_seconds / max(len(times), 1)
        ops = tuple(
            Op(seconds * scale if scale else alike, frozenset(tensors))
            for seconds, tensors in traced["ops"]
        )
        sizes = dict(enumerate(traced["sizes"]))
        return cls(ops, sizes, frozenset(traced["persistent"]), frozenset(traced["written"]))

    @property
    def seconds(self) -> float:
        """Total compute time."""
        return sum(op.seconds for op in self.ops)


@dataclass(frozen=True)
class Cuts:
    """Bytes at each op: see the module."""

    working: list[int]
    spanning: list[int]
    persistent: list[int]  # P: of the spanning
    next_step: list[int]  # P2: of the persistent
    unwritten: list[int]  # of the persistent, those that the step does not write

    @property
    def peak(self) -> int:
        """Peak of the bytes in use at once."""
        return max((w + s for w, s in zip(self.working, self.spanning, strict=True)), default=0)


def cuts(step: Step) -> Cuts:
    """Compute the bound in one pass over the uses of each tensor."""
    count = len(step.ops)
    uses: dict[int, list[int]] = {}
    for t, op in enumerate(step.ops):
        for tensor in op.tensors:
            uses.setdefault(tensor, []).append(t)
    spanning, persistent, next_step, unwritten = ([0] * (count + 1) for _ in range(4))

    def span(line: list[int], begin: int, end: int, size: int) -> None:
        """`size` bytes more at the ops from `begin` up to, not including, `end`."""
        if begin < end:
            line[begin] += size
            line[end] -= size

    for tensor, at in uses.items():
        size = step.sizes[tensor]
        lines = [spanning]
        gaps = [(a + 1, b) for a, b in pairwise(at)]
        if tensor in step.persistent:
            gaps += [(0, at[0]), (at[-1] + 1, count)]
            span(next_step, at[-1] + 1, count, size)
            lines.append(persistent)
            if tensor not in step.written:
                lines.append(unwritten)
        for begin, end in gaps:
            for line in lines:
                span(line, begin, end, size)
    working = [sum(step.sizes[tensor] for tensor in op.tensors) for op in step.ops]
    sums = [list(accumulate(line))[:count] for line in (spanning, persistent, next_step, unwritten)]
    return Cuts(working, *sums)


def closed_form_floor(
    step: Step, capacity: int, bytes_in_s: float, bytes_out_s: float, found: Cuts | None = None
) -> float:
    """Seconds that no schedule of `step` can beat with `capacity` bytes and this link."""
    if bytes_in_s <= 0 or bytes_out_s <= 0:
        raise ValueError(f"a link of {bytes_in_s}, {bytes_out_s} bytes a second; allowed: above 0")
    c = found or cuts(step)
    times = [op.seconds for op in step.ops]
    whole = sum(times)
    floor, before = whole, 0.0
    for t, own in enumerate(times):
        over = c.spanning[t] + c.working[t] - capacity
        after = max(whole - before - own, 0.0)
        if over > 0:
            leave = max(before, (over - c.persistent[t]) / bytes_out_s)
            arrive = max(after, (over - c.next_step[t]) / bytes_in_s)
            steady = max(over / bytes_in_s, (over - c.unwritten[t]) / bytes_out_s)
            floor = max(floor, leave + arrive, steady)
        before += own
    return floor
