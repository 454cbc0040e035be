"""Lower bounds on what any schedule moves and how long a step takes, without a linear program.

The model. The step repeats, in steady state. While an op runs, there is a moment when all tensors
that it accesses, W_t bytes, are on the device together, beside S_t - x_t of the S_t bytes in gaps
that span the op: x_t are away, so x_t >= O_t = S_t + W_t - capacity. What is away in a gap comes in
again before the gap ends, once a gap. Every byte away has a copy on the host, made after its last
write. A tensor that an op writes counts as read as well: a fault on a page brings the page in.
Nothing is assumed of a tensor outside its gaps (see `Spans`), of neighbours of the step, of the
order of transfers, or of pages: parts of a tensor may move. So the bounds hold for any policy of an
engine that protects the tensors of the running op, whatever its lanes, faults and pools cost.

Each function raises PlanError where an op accesses more than `capacity`: then no such schedule
exists, and an engine pages inside the op.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..devices import DeviceProfile
from ..errors import PlanError
from ..trace.step import Ints, StepTrace
from ..units import format_bytes
from ..values import FLOOR_PAGES, PAGE_BYTES
from .spans import Spans, furthest_start

BUDGET_MARGIN = 1.05  # over the largest op: room for the pages at its tensors' edges


class Need(NamedTuple):
    """The op that needs most at once, and the bytes it needs."""

    op: int
    bytes: int


class Cut(NamedTuple):
    """Bytes that have to move, and the ops at which they are away."""

    bytes: int
    ops: tuple[int, ...]


class Floor(NamedTuple):
    """A time that no step is below, and what sets it.

    `bound` is compute, bytes in, bytes out, or turning point: then at `op` more is away than can
    leave before it and come back after it beside compute. Of the byte bounds `op` is their largest
    cut; of compute it is -1.
    """

    us: float
    bound: str
    op: int


def largest_op(trace: StepTrace) -> Need:
    """The op whose tensors need most: whole pages, as many for small tensors as they can lie in."""
    large = np.where(trace.large, trace.bytes, 0)
    need = trace.sum_of_accesses(large)
    pages = trace.sum_of_accesses(np.where(trace.large, 0, PAGE_BYTES))
    need += np.minimum(pages, trace.small_bytes)
    if not len(need):
        return Need(-1, 0)
    op = int(np.argmax(need))
    return Need(op, int(need[op]))


def least_budget(trace: StepTrace) -> int:
    """The least budget to compare policies at: 1.05 times the largest op's need, in whole pages.

    Below the largest op's working set an engine has to page inside the op; measured slowdowns then
    say little of a policy.
    """
    pages = int(-(-largest_op(trace).bytes * BUDGET_MARGIN // PAGE_BYTES))
    return max(pages, FLOOR_PAGES) * PAGE_BYTES


def cut_bound(trace: StepTrace, capacity: int) -> Cut:
    """The largest cut, max over ops t of S_t + W_t - capacity: a bound on bytes in. O(n + k).

    All that is away at op t comes in after it, once for each gap.
    """
    return _largest(excess_bytes(Spans(trace), capacity))


def disjoint_cuts(trace: StepTrace, capacity: int) -> Cut:
    """Cuts whose sum bounds bytes in, because no gap spans two of them. O(n log n + k).

    The largest cut, and from it around the step the best choice of others (weighted interval
    scheduling); so it is at least `cut_bound`.
    """
    return _cuts_in(trace, excess_bytes(Spans(trace), capacity))


def pfoo_l(trace: StepTrace, capacity: int) -> float:
    """Bytes in at least, by room over time: PFOO-L of Berger, Beckmann, Harchol-Balter 2018.

    Keeping a gap takes bytes x ops spanned of the room, the sum over ops of capacity - W_t. The
    shortest gaps are kept first (the last one in part) until the room of all ops together is full;
    the bytes of the others come in. A bound because it drops the condition that each op's room
    holds what is kept in it. O(k log k).
    """
    room = int((capacity - _checked(trace, capacity)).sum())
    length = trace.gaps.end - trace.gaps.start - 1
    order = np.argsort(length, kind="stable")
    size, length = trace.bytes[trace.gaps.tensor[order]], length[order]
    taken = np.cumsum(size * length)
    whole = int(np.searchsorted(taken, room, side="right"))
    if whole == len(size):
        return 0.0
    left = room - (int(taken[whole - 1]) if whole else 0)
    return float(size[whole:].sum()) - left / float(length[whole])


def lower_bound_bytes_in(trace: StepTrace, capacity: int) -> int:
    """Bytes in a step at least, in steady state: the largest of the cuts, their sum and PFOO-L."""
    return _bytes_in(trace, capacity, excess_bytes(Spans(trace), capacity))


def lower_bound_bytes_out(trace: StepTrace, capacity: int) -> int:
    """Bytes out a step at least, in steady state: a sum of cuts without what is clean.

    Of what is away at op t each byte was written back after its last write. A write-back serves
    all gaps up to the next write, so cuts add up where no such stretch spans two of them. Tensors
    that the step does not write cost nothing: their copy on the host stays valid, and an engine
    that can drop the device's copy attains it; one that migrates them moves bytes out as well.
    """
    spans = Spans(trace)
    return _bytes_out(spans, excess_bytes(spans, capacity))


def closed_form_floor(trace: StepTrace, device: DeviceProfile, capacity: int) -> Floor:
    """The step time that no swapping schedule is below, in µs. O(n + k log k).

    For an op t with O_t = S_t + W_t - capacity > 0, P_t the spanning bytes that need no write-back
    since the step's begin and Q_t those next used after its end:
    max(compute before t, (O_t - P_t) / BW_out) + max(compute after t, (O_t - Q_t) / BW_in)
    holds in any single step, whatever its neighbours do: what is away at t and was made in the step
    left before t, and what the step uses again comes back after t. In steady state it holds as well
    where the step is taken to begin at another op, such as the first of the optimizer: what that
    writes cannot leave before (`Spans.begins`). The floor is the largest of these, of all compute,
    and of the bytes in and out over their bandwidths.
    """
    spans = Spans(trace)
    over = excess_bytes(spans, capacity)
    cut = _largest(over)
    where = cut.ops[0] if cut.ops else -1
    floors = [
        Floor(trace.compute_us, "compute", -1),
        Floor(_bytes_in(trace, capacity, over) / device.bytes_per_us_in, "bytes in", where),
        Floor(_bytes_out(spans, over) / device.bytes_per_us_out, "bytes out", where),
    ]
    for begin in spans.begins if over.any() else ():
        before, after = spans.beside(begin)
        out, back = spans.transfers_us(over, device, begin)
        turn = np.maximum(before, out) + np.maximum(after, back)
        op = int(np.argmax(turn))
        floors.append(Floor(float(turn[op]), "turning point", op))
    return max(floors, key=lambda floor: floor.us)


def _checked(trace: StepTrace, capacity: int) -> Ints:
    """[n] W_t, of which none exceeds the capacity."""
    size = trace.working_set
    if len(size) and int(size.max()) > capacity:
        op = int(np.argmax(size))
        raise PlanError(
            f"op {op} ({trace.op_names[op]}) accesses {format_bytes(int(size[op]))} at once, and "
            f"the budget is {format_bytes(capacity)}; bounds hold from there on: give at least "
            f"{format_bytes(least_budget(trace))}"
        )
    return size


def excess_bytes(spans: Spans, capacity: int) -> Ints:
    """[n] Bytes that are away at each op at least."""
    _checked(spans.trace, capacity)
    return np.maximum(spans.need - capacity, 0)


def _bytes_in(trace: StepTrace, capacity: int, excess: Ints) -> int:
    if not excess.any():
        return 0
    in_part = int(np.ceil(pfoo_l(trace, capacity) - 1e-6))
    return max(_cuts_in(trace, excess).bytes, in_part)


def _bytes_out(spans: Spans, excess: Ints) -> int:
    if not excess.any():
        return 0
    start, end = _stretches(spans)
    dirty = np.maximum(excess - spans.clean, 0)
    return _sum_of_cuts(dirty, furthest_start(start, end, spans.trace.n_ops)).bytes


def _cuts_in(trace: StepTrace, excess: Ints) -> Cut:
    gaps = trace.gaps
    return _sum_of_cuts(excess, furthest_start(gaps.start, gaps.end, trace.n_ops))


def _largest(excess: Ints) -> Cut:
    if not len(excess) or excess.max() == 0:
        return Cut(0, ())
    op = int(np.argmax(excess))
    return Cut(int(excess[op]), (op,))


def _stretches(spans: Spans) -> tuple[Ints, Ints]:
    """The ops between which each write's result is in gaps, from the first one to the last."""
    n, writes = spans.trace.n_ops, len(spans.trace.access_op)
    dirty = spans.version >= 0
    version, later = spans.version[dirty], (spans.write_op[dirty] < 0) * n
    start = np.full(writes, 2 * n, np.int64)
    end = np.zeros(writes, np.int64)
    np.minimum.at(start, version, spans.trace.gaps.start[dirty] + later)
    np.maximum.at(end, version, spans.trace.gaps.end[dirty] + later)
    start, end = start[end > 0], end[end > 0]
    around = start >= n  # no gap of the step it was written in
    return start - around * n, end - around * n


def _sum_of_cuts(excess: Ints, reach: Ints) -> Cut:
    """The largest cut and others around the circle, each at most `reach` of the one after it."""
    first = _largest(excess)
    if not first.ops:
        return first
    n, pivot = len(excess), first.ops[0]
    op = np.arange(pivot + 1, min(pivot + n, reach[pivot] + n + 1))
    bound = reach[op % n] + op // n * n
    chosen = (excess[op % n] > 0) & (bound >= pivot)
    op, bound = op[chosen], bound[chosen]
    value = excess[op % n].tolist()
    before = np.searchsorted(op, bound, side="right").tolist()  # how many it can follow
    best = [0]
    for i, amount in enumerate(value):
        best.append(max(best[i], amount + best[before[i]]))
    ops, i = [pivot], len(value)
    while i:
        if best[i] == best[i - 1]:
            i -= 1
        else:
            ops.append(int(op[i - 1]) % n)
            i = before[i - 1]
    return Cut(first.bytes + best[-1], tuple(sorted(ops)))
