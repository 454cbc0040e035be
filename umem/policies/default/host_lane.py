"""The host's updates of parameters: the tensors that leave for them, and when they can return."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from ...base.device_profiles import DeviceProfile
from ...trace.step_trace import Floats, Gaps, HostUpdates, Ints, StepTrace
from .occupancy import joined, select


class Updated(NamedTuple):
    """The gaps in which parameters and gradients leave for the host's updates.

    All of them are spent swapped out, whatever the budget. A gradient is freed once it has left.
    """

    gaps: Gaps  # by start
    after: Ints  # [gaps] the op after which a parameter may return; of a gradient its `start`
    returns: Ints  # indices of the gaps of parameters
    updates: HostUpdates  # tensors are given as indices of gaps
    held: Ints  # [n_ops] bytes of gradients that are on their way to the host
    others: Ints  # indices of all other gaps of the step


def updated(trace: StepTrace, device: DeviceProfile, gaps: Gaps) -> Updated | None:
    """Return these gaps of a step in pieces, where `gaps` are all; None without any update.

    The time at which a parameter may return is an estimate for a step without stalls whose link to
    the host carries nothing else.
    """
    rows = trace.updates
    if rows is None or not len(rows.us):
        return None
    wanted = rows.parameter[rows.parameter >= 0]
    every = joined(gaps, _without_ops_between(trace, gaps, wanted))
    place = np.full(trace.n_tensors, -1)
    around = np.flatnonzero(every.end >= trace.n_ops)
    place[every.tensor[around]] = around
    parameters = place[wanted]
    others = np.setdiff1d(np.arange(len(gaps.tensor)), parameters)
    gradients = np.unique(rows.gradient)
    left = trace.last[gradients]
    of_parameters = select(every, parameters)
    # A parameter leaves when its gradient is complete, so that both are updated then.
    count = len(parameters)
    away = joined(of_parameters, Gaps(gradients, left, left + 1, np.zeros(len(gradients))))
    of_gradient = np.zeros(trace.n_tensors, np.int64)
    of_gradient[gradients] = count + np.arange(len(gradients))
    found = HostUpdates(
        np.arange(count),
        of_gradient[rows.gradient[rows.parameter >= 0]],
        rows.us[rows.parameter >= 0],
    )
    arrives = _arrivals(trace, device, away)
    after = np.concatenate((_after(trace, away, found, arrives), left))
    order = np.lexsort((away.tensor, away.start))
    rank = np.argsort(order)
    return Updated(
        select(away, order),
        after[order],
        rank[:count],
        HostUpdates(rank[found.parameter], rank[found.gradient], found.us),
        _held(trace, gradients, arrives[count:]),
        others,
    )


def _without_ops_between(trace: StepTrace, gaps: Gaps, parameters: Ints) -> Gaps:
    """Return the gaps of parameters used by the last op and by the first op of the next step.

    Other gaps have at least one op inside. A parameter that the host updates leaves and returns
    even if no op is left in between.
    """
    around = gaps.tensor[gaps.end >= trace.n_ops]
    tensor = np.setdiff1d(parameters, around)
    uses = [trace.uses(one) for one in tensor.tolist()]
    start = np.array([use[-1] for use in uses], np.int64)
    end = np.array([use[0] + trace.n_ops for use in uses], np.int64)
    return Gaps(tensor, start, end, np.zeros(len(tensor)))


def _held(trace: StepTrace, gradients: Ints, arrives: Floats) -> Ints:
    n = trace.n_ops
    change = np.zeros(2 * n + 1, np.int64)
    begin = trace.begin_twice_us
    np.add.at(change, trace.last[gradients] + 1, trace.bytes[gradients])
    until = np.searchsorted(begin, arrives, side="left")
    np.add.at(change, np.minimum(until, 2 * n), -trace.bytes[gradients])
    total = np.cumsum(change)
    return total[:n] + total[n : 2 * n]


def _after(trace: StepTrace, away: Gaps, updates: HostUpdates, arrives: Floats) -> Ints:
    """Return for each update the op after which its parameter may return."""
    n = trace.n_ops
    begin = trace.begin_twice_us
    left = np.maximum(begin[away.start[updates.parameter] + 1], arrives[updates.gradient])
    due = away.end[updates.parameter]
    end: Floats = np.zeros(len(updates.us))
    waiting: list[tuple[int, int]] = []
    # The same rule as of the engine (src/base/host_lane.h): the earliest due of what is there.
    order = np.argsort(left, kind="stable").tolist()
    free, at = 0.0, 0
    while at < len(order) or waiting:
        if not waiting:
            free = max(free, float(left[order[at]]))
        while at < len(order) and left[order[at]] <= free:
            heapq.heappush(waiting, (int(due[order[at]]), order[at]))
            at += 1
        _, k = heapq.heappop(waiting)
        free += float(updates.us[k])
        end[k] = free
    # The first op that begins when the update is over; the one before it has ended.
    first = np.searchsorted(begin, end, side="left")
    after: Ints = np.clip(first - 1, away.start[updates.parameter], np.minimum(due - 1, 2 * n - 1))
    return after


def _arrivals(trace: StepTrace, device: DeviceProfile, away: Gaps) -> Floats:
    """Return when each gradient is on the host; the values for parameters have no meaning."""
    ready = trace.begin_us[np.minimum(away.start + 1, trace.n_ops)]
    arrives = np.zeros(len(ready))
    free = 0.0
    gradients = np.flatnonzero(away.end == away.start + 1)
    for gap in gradients[np.argsort(ready[gradients], kind="stable")].tolist():
        size = float(trace.bytes[away.tensor[gap]])
        free = arrives[gap] = max(free, float(ready[gap])) + size / device.bytes_per_us_out
    return arrives
