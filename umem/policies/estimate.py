"""How long a step takes when a set of gaps is spent away: enough to prefer one set to another."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ..devices import DeviceProfile
from ..trace.step import Gaps, Ints, StepTrace
from .writeback import Copies, Quiet, quiet_times


class Choice(NamedTuple):
    """Gaps spent away: a tensor leaves when `start` has ended, in that order."""

    away: Gaps
    returns: Ints  # indices of those that come back for `end`, by deadline
    occupancy: Ints  # [n_ops] bytes of large tensors that are not away


class Estimate(NamedTuple):
    """The second of two equal steps."""

    us: float
    quiet: Quiet
    # [quiet times] The op at whose begin the write-back starts, by the step in which the quiet time
    # ends; NEVER: the link out is not idle in time.
    copied: Ints


def estimate(trace: StepTrace, device: DeviceProfile, choice: Choice, room: int) -> Estimate:
    """How long the second of two equal steps takes, with each direction of the link as a fluid.

    A return starts at the first op from which on the occupancy leaves room for it, out of `room`
    bytes, until its use. An op starts when its tensors are there and what is still leaving takes no
    more than the room that is left. While the link out is idle, what has been written for the last
    time before it leaves is written back, what leaves first to begin with.
    """
    away, returns, _ = choice
    n = trace.n_ops
    amount = trace.bytes[away.tensor]
    ready, taken = earliest(choice, amount, room)
    # What nothing writes is read-mostly: the host's copy is valid once it has come from there.
    out_us = np.where(trace.clean[away.tensor], 0.0, amount / device.bytes_per_us_out).tolist()
    in_us = (amount / device.bytes_per_us_in).tolist()
    leaves = _by_op(np.arange(len(amount)), away.start + 1, n)
    starts = _by_op(returns, ready, n)
    needs = _by_op(returns, away.end[returns], n)
    slack = (np.maximum(room - taken, 0) / device.bytes_per_us_out).tolist()
    duration = trace.op_us.tolist()
    departure, arrival = [0.0] * len(amount), [0.0] * len(amount)
    quiet = quiet_times(trace, away)
    copy_us = trace.bytes[quiet.tensor] / device.bytes_per_us_out
    copies = Copies(quiet, copy_us.tolist(), n)
    of_gap = quiet.of_gap.tolist()
    now = out_free = in_free = begin = left = 0.0
    for point in range(2 * n):
        op = point % n
        if op == 0:
            begin = now
        for gap in leaves[op]:
            copied = copies.ready(of_gap[gap], point - 1)
            if copied is not None:
                departure[gap] = max(now, copied)
                continue
            left = out_free = departure[gap] = max(out_free, now) + out_us[gap]
            copies.moved(of_gap[gap], point - 1, left)
        empty = max(now, left - slack[op])  # what is leaving by then has left enough room
        for gap in starts[op]:
            in_free = arrival[gap] = max(in_free, departure[gap], empty) + in_us[gap]
        for gap in needs[op]:
            now = max(now, arrival[gap])
        now = max(now, left - slack[op])
        out_free = copies.fill(point, max(out_free, now), now + duration[op])
        now += duration[op]
    return Estimate(now - begin, quiet, copies.started())


def earliest(choice: Choice, amount: Ints, room: int) -> tuple[Ints, Ints]:
    """The op at which each return starts, and the occupancy with all of them.

    As the engine does it: of what is away the one that is due first starts as soon as there is room
    for it until its use, and no other before it. The second of two steps.
    """
    away, returns, occupancy = choice
    n = len(occupancy)
    taken = np.tile(occupancy, 3)
    columns = (away.start[returns], away.end[returns], amount[returns])
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    ready = [0] * len(rows)
    leaving = sorted(
        (start + 1 + lap * n, i, lap) for lap in (0, 1) for i, (start, _, _) in enumerate(rows)
    )
    waiting: list[tuple[int, int, int]] = []  # (due, which, lap), the first due first
    point, following = 0, 0
    blocked = -1, 0, 0  # which one there is no room for, and until when
    while waiting or following < len(leaving):
        if not waiting:
            point = max(point, leaving[following][0])
        while following < len(leaving) and leaving[following][0] <= point:
            _, i, lap = leaving[following]
            heappush(waiting, (rows[i][1] + lap * n, i, lap))
            following += 1
        due, i, lap = waiting[0]
        size = rows[i][2]
        if blocked[:2] != (i, lap):
            full = (taken[point:due] > room - size)[::-1]
            last = int(full.argmax()) if len(full) else 0
            blocked = i, lap, due - last if len(full) and full[last] else point
        if blocked[2] > point:  # not before that, unless one that is due earlier leaves
            point = blocked[2]
            if following < len(leaving):
                point = min(point, leaving[following][0])
            continue
        heappop(waiting)
        begin = min(point, due)
        taken[begin:due] += size
        if lap:
            ready[i] = begin - n
    return np.array(ready, np.int64), taken[n : 2 * n]


def _by_op(gaps: Ints, op: Ints, n: int) -> list[list[int]]:
    """For each op of a step its gaps, in the order given."""
    place = op % n
    order = np.argsort(place, kind="stable")
    ordered = gaps[order].tolist()
    ends = list(accumulate(np.bincount(place, minlength=n).tolist()))
    return [ordered[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
