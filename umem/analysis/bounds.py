"""Lower bounds on the bytes that any schedule moves and on its step time, in closed form.

The model. The step repeats, in steady state. While an op runs, there is a moment when all tensors
that it accesses, W_t bytes, are on the device together with S_t - x_t of the S_t bytes in idle
intervals ("gaps") that span the op: x_t are swapped out, so x_t >= O_t = S_t + W_t - capacity.
Bytes swapped out in a gap return before the gap ends, once per gap, unless the program frees the
tensor at its end, or overwrites it whole. Every swapped-out byte has a copy on the host, made after
its last write: an engine keeps bytes that it cannot know to be dead. Nothing is assumed about a
tensor outside its gaps (see `IdleIntervals`), about neighbouring steps, the order of transfers, or
pages: parts of a tensor may move. If ops use parts of a tensor, it is divided where a part begins
or ends. So the bounds apply to any policy of an engine that protects the tensors of the running
op, whatever the cost of its transfer queues, faults and pools.

Each function raises PlanError if an op accesses more than `capacity` bytes: then no such schedule
exists, and an engine must page inside the op.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..base.device_profiles import DeviceProfile
from ..base.units import FLOOR_PAGES, PAGE_BYTES, format_bytes
from ..errors import PlanError
from ..trace.step_trace import Ints, StepTrace
from .idle_intervals import IdleIntervals, furthest_start
from .turning_points import turns

BUDGET_MARGIN = 1.05  # times the largest op: space for the pages at its tensors' edges


class Need(NamedTuple):
    """The op that needs the most bytes, and its need."""

    op: int
    bytes: int


class Cut(NamedTuple):
    """Bytes that must move, and the ops at which they are swapped out."""

    bytes: int
    ops: tuple[int, ...]


class Floor(NamedTuple):
    """A lower bound of the step time, and its cause.

    `bound` is "compute", "bytes in", "bytes out" or "turning point": at `op`, more bytes are
    swapped out than can leave before it and return after it while compute runs; or several turning
    points, of which `op` is the highest. For the byte bounds `op` has the most bytes swapped out;
    for compute it is -1.
    """

    us: float
    bound: str
    op: int


def largest_op(trace: StepTrace) -> Need:
    """Return the op whose tensors need the most bytes, in whole pages.

    A tensor of which an op uses a part counts with the pieces that the part is in. Each small
    tensor counts as one page, but all of them as at most the pages of small tensors.
    """
    pieces = trace.in_parts
    need = pieces.sum_of_accesses(np.where(pieces.large, pieces.bytes, 0))
    pages = trace.sum_of_accesses(np.where(trace.large, 0, PAGE_BYTES))
    need += np.minimum(pages, trace.small_bytes)
    if not len(need):
        return Need(-1, 0)
    op = int(np.argmax(need))
    return Need(op, int(need[op]))


def min_budget(trace: StepTrace) -> int:
    """Return the minimum budget in bytes to compare policies at, in whole pages.

    It is 1.05 times the need of the largest op. Below the largest op's working set an engine must
    page inside the op, and slowdowns then say little about a policy.
    """
    pages = int(-(-largest_op(trace).bytes * BUDGET_MARGIN // PAGE_BYTES))
    return max(pages, FLOOR_PAGES) * PAGE_BYTES


def pfoo_l(spans: IdleIntervals, capacity: int) -> float:
    """Return a lower bound of bytes in, by space over time.

    PFOO-L of Berger, Beckmann, Harchol-Balter 2018. Keeping a gap on the device takes bytes x ops
    spanned out of the sum over ops of capacity - W_t. The shortest of the gaps that return are kept
    first (the last one in part) until that sum is used up; the bytes of the others come in. It is a
    lower bound because it drops the condition that each op by itself has space for what is kept
    over it. O(k log k).
    """
    room = int((capacity - _checked(spans.trace, capacity)).sum())
    length = spans.gaps.end - spans.gaps.start - 1
    order = np.argsort(length, kind="stable")
    order = order[spans.returns[order]]
    size, length = spans.bytes[order], length[order]
    taken = np.cumsum(size * length)
    whole = int(np.searchsorted(taken, room, side="right"))
    if whole == len(size):
        return 0.0
    left = room - (int(taken[whole - 1]) if whole else 0)
    return float(size[whole:].sum()) - left / float(length[whole])


def lower_bound_bytes_in(trace: StepTrace, capacity: int) -> int:
    """Return a lower bound of the bytes in per step, in steady state.

    It is the larger of `disjoint_cuts` and `pfoo_l`.
    """
    spans = IdleIntervals(trace.in_exact_parts)
    return _bytes_in(spans, capacity, excess_bytes(spans, capacity))


def lower_bound_bytes_out(trace: StepTrace, capacity: int) -> int:
    """Return a lower bound of the bytes out per step, in steady state.

    It is a sum of cuts without clean bytes. Each byte swapped out at op t was written back after
    its last write. A write-back serves all gaps up to the next write, so cuts add up if no such
    stretch spans two of them. Tensors that the step does not write cost nothing: their copy on the
    host remains valid. An engine that can drop the device's copy attains this; one that migrates
    them moves bytes out as well.
    """
    spans = IdleIntervals(trace.in_exact_parts)
    return _bytes_out(spans, excess_bytes(spans, capacity))


def closed_form_floor(trace: StepTrace, device: DeviceProfile, capacity: int) -> Floor:
    """Return a lower bound of the step time in µs of any swapping schedule. O(n + k log k).

    Take an op t with O_t = S_t + W_t - capacity > 0, P_t the spanning bytes that need no write-back
    since the start of the step, and Q_t those that are next used after its end, or never. Then
    max(compute before t, (O_t - P_t) / BW_out) + max(compute after t, (O_t - Q_t) / BW_in)
    bounds any single step, whatever its neighbours do: bytes swapped out at t and made in the step
    left before t, and bytes that the step uses again return after t. In steady state this also
    applies if the step is taken to start at another op, such as the first of the optimizer, whose
    results cannot leave before it (`IdleIntervals.begins`). The bound is the largest of these, of
    several such ops in a row (`turning_points`), of all compute, and of the bytes in and out over
    their bandwidths.
    """
    spans = IdleIntervals(trace.in_exact_parts)
    over = excess_bytes(spans, capacity)
    cut = _largest(over)
    where = cut.ops[0] if cut.ops else -1
    floors = [
        Floor(trace.compute_us, "compute", -1),
        Floor(_bytes_in(spans, capacity, over) / device.bytes_per_us_in, "bytes in", where),
        Floor(_bytes_out(spans, over) / device.bytes_per_us_out, "bytes out", where),
    ]
    for begin in spans.begins if over.any() else ():
        before, after = spans.beside(begin)
        out, back = spans.transfers_us(over, device, begin)
        turn = np.maximum(before, out) + np.maximum(after, back)
        op = int(np.argmax(turn))
        floors.append(Floor(float(turn[op]), "turning point", op))
    if over.any():
        several = turns(spans, device, over)
        floors.append(Floor(several.us, f"{len(several.ops)} turning points, the highest", where))
    return max(floors, key=lambda floor: floor.us)


def _checked(trace: StepTrace, capacity: int) -> Ints:
    """Return W_t, [n]; PlanError where one exceeds the capacity."""
    size = trace.working_set
    if len(size) and int(size.max()) > capacity:
        op = int(np.argmax(size))
        raise PlanError(
            f"op {op} ({trace.op_names[op]}) accesses {format_bytes(int(size[op]))}, and "
            f"the budget is {format_bytes(capacity)}; no schedule exists at that: give at least "
            f"{format_bytes(min_budget(trace))}"
        )
    return size


def excess_bytes(spans: IdleIntervals, capacity: int) -> Ints:
    """Return the minimum bytes that are swapped out at each op, [n]."""
    _checked(spans.trace, capacity)
    return np.maximum(spans.need - capacity, 0)


def _bytes_in(spans: IdleIntervals, capacity: int, excess: Ints) -> int:
    if not excess.any():
        return 0
    in_part = int(np.ceil(pfoo_l(spans, capacity) - 1e-6))
    return max(disjoint_cuts(spans, excess).bytes, in_part)


def _bytes_out(spans: IdleIntervals, excess: Ints) -> int:
    if not excess.any():
        return 0
    start, end = _stretches(spans)
    dirty = np.maximum(excess - spans.clean, 0)
    return _sum_of_cuts(dirty, furthest_start(start, end, spans.trace.n_ops)).bytes


def disjoint_cuts(spans: IdleIntervals, excess: Ints) -> Cut:
    """Return cuts whose sum bounds bytes in, because no gap that returns spans two of them.

    All that is swapped out at an op comes in after it, once for each gap, except the bytes that are
    only held. The largest cut is one of them; the others are the best choice around the rest of the
    step (weighted interval scheduling). O(n log n + k).
    """
    back = spans.returns
    reach = furthest_start(spans.gaps.start[back], spans.gaps.end[back], spans.trace.n_ops)
    return _sum_of_cuts(np.maximum(excess - spans.unread, 0), reach)


def _largest(excess: Ints) -> Cut:
    if not len(excess) or excess.max() == 0:
        return Cut(0, ())
    op = int(np.argmax(excess))
    return Cut(int(excess[op]), (op,))


def _stretches(spans: IdleIntervals) -> tuple[Ints, Ints]:
    """Return for each write's result the ops where its first gap starts and its last gap ends."""
    n, writes = spans.trace.n_ops, len(spans.trace.access_op)
    dirty = spans.version >= 0
    version, later = spans.version[dirty], (spans.write_op[dirty] < 0) * n
    start = np.full(writes, 2 * n, np.int64)
    end = np.zeros(writes, np.int64)
    np.minimum.at(start, version, spans.gaps.start[dirty] + later)
    np.maximum.at(end, version, spans.gaps.end[dirty] + later)
    start, end = start[end > 0], end[end > 0]
    around = start >= n  # all its gaps are in the step after the write
    return start - around * n, end - around * n


def _sum_of_cuts(excess: Ints, reach: Ints) -> Cut:
    """Return the largest cut and others around the circle, each at most `reach` of the next."""
    first = _largest(excess)
    if not first.ops:
        return first
    n, pivot = len(excess), first.ops[0]
    op = np.arange(pivot + 1, min(pivot + n, reach[pivot] + n + 1))
    bound = reach[op % n] + op // n * n
    chosen = (excess[op % n] > 0) & (bound >= pivot)
    op, bound = op[chosen], bound[chosen]
    value = excess[op % n].tolist()
    before = np.searchsorted(op, bound, side="right").tolist()  # how many of the ops can precede it
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
