"""A bound of the step time from several turning points: ops at which many bytes are swapped out.

Between two such ops, bytes swapped out at the first one and used before the second must come in,
and bytes swapped out at the second and written since the first must leave. Around the step the
times between neighbours add up, so a step with many peaks, such as one that accumulates gradients
over several passes, costs more than its highest one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..base.device_profiles import DeviceProfile
from ..trace.step_trace import Floats, Ints, StepTrace
from .idle_intervals import IdleIntervals

_POINTS = 64  # slices of the step's time, in each of which at most two ops are considered


class Turns(NamedTuple):
    """A lower bound of the step time in µs, and its turning points in order."""

    us: float
    ops: tuple[int, ...]


def instants_of(trace: StepTrace, need: Ints, windows: int, also: int) -> Ints:
    """Return the op of the highest need in each time slice, and op `also` unless it is -1."""
    middle = (trace.begin_us[:-1] + trace.begin_us[1:]) / 2
    width = max(trace.compute_us, 1e-9) / windows
    piece = np.minimum((middle / width).astype(np.int64), windows - 1)
    order = np.lexsort((need, piece))
    best = order[np.flatnonzero(np.diff(piece[order], append=windows))]
    return np.unique(np.append(best, also) if also >= 0 else best)


def turns(spans: IdleIntervals, device: DeviceProfile, excess: Ints) -> Turns:
    """Return the highest bound, with its turning points. O(k + p^2), p <= 130.

    The times between two turning points exclude the points' own ops, since the moment at which an
    op holds all of its tensors may be anywhere in it.

    Args:
        spans: the gaps of the step, k of them.
        device: the device, for its bandwidths.
        excess: the least bytes that are swapped out at each op, [n].
    """
    trace = spans.trace
    # Bytes only held leave, but do not return: the two directions may have different peaks.
    needs = (spans.need, spans.need - spans.unread)
    highest = np.unique([int(np.argmax(excess)), int(np.argmax(excess - spans.unread))])
    points = np.unique(
        np.concatenate((highest, *(instants_of(trace, need, _POINTS, -1) for need in needs)))
    )
    cost = _between(spans, device, excess[points], points)
    ways = (_longest_way(cost, points, int(at)) for at in np.searchsorted(points, highest))
    return max(ways, key=lambda way: way.us)


def _between(spans: IdleIntervals, device: DeviceProfile, over: Ints, points: Ints) -> Floats:
    """Return the least time from each point to each later one, up to a step later, [p, 2p], in µs.

    Columns p and later are points of the next step. Before the diagonal the time is negative.
    """
    trace, p = spans.trace, len(points)
    both, early = _sums(spans, points)
    begin = np.concatenate((trace.begin_us[points], trace.begin_us[points] + trace.compute_us))
    compute = begin[None, :] - trace.begin_us[points + 1][:, None]
    back = (over[:, None] - spans.unread[points][:, None] - both) / device.bytes_per_us_in
    out = (np.concatenate((over, over))[None, :] - early) / device.bytes_per_us_out
    least = np.maximum(np.maximum(compute, 0), np.maximum(back, out))
    at, to = np.arange(p)[:, None], np.arange(2 * p)[None, :]
    return np.where((to > at) & (to <= at + p), least, -np.inf)


def _sums(spans: IdleIntervals, points: Ints) -> tuple[Ints, Ints]:
    """Return the bytes of gaps by the points that they span, [p, 2p] each.

    The first are gaps that span both the row's and the column's point, and whose contents return;
    the second span the column's, and their copy on the host may be older than the row's.
    """
    n, p = spans.trace.n_ops, len(points)
    places = np.concatenate((points, points + n))
    size = 2 * p + 1
    both, early = np.zeros((2, size, size), np.int64)
    clean = spans.version < 0
    for shift in (-n, 0, n):
        first = np.searchsorted(places, spans.gaps.start + shift, side="right")
        end = np.searchsorted(places, spans.gaps.end + shift, side="left")
        after = np.searchsorted(places, spans.write_op + shift, side="right")
        after = np.where(clean, 0, after)
        inside = end > first
        amount = spans.bytes[inside]
        back = inside & spans.returns
        np.add.at(both, (first[back], end[back]), spans.bytes[back])
        np.add.at(early, (after[inside], first[inside]), amount)
        np.add.at(early, (after[inside], end[inside]), -amount)
    # A gap spans row and column if it begins at or before the row and ends after the column.
    spanned = np.cumsum(np.cumsum(both, axis=0)[:, ::-1], axis=1)[:, ::-1]
    older = np.cumsum(np.cumsum(early, axis=0), axis=1)
    return spanned[:p, 1:], older[:p, :-1]


def _longest_way(cost: Floats, points: Ints, start: int) -> Turns:
    """Return the way around the step of the highest sum that passes `start`."""
    p = len(points)
    # Rows of the next step cost what they do in this one.
    rows = np.full((2 * p, 2 * p), -np.inf)
    rows[:p] = cost
    rows[p:, p:] = cost[:, :p]
    best = np.full(2 * p, -np.inf)
    before = np.zeros(2 * p, np.int64)
    best[start] = 0.0
    for to in range(start + 1, start + p + 1):
        sums = best[start:to] + rows[start:to, to]
        chosen = int(np.argmax(sums))
        best[to], before[to] = sums[chosen], start + chosen
    ops, at = [], start + p
    while at != start:
        at = int(before[at])
        ops.append(int(points[at % p]))
    return Turns(float(best[start + p]), tuple(sorted(ops)))
