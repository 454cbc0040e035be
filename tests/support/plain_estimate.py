"""The duration of a step with tensors swapped out in gaps, as plain loops; see src/planner."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from umem.base.device_profiles import DeviceProfile
from umem.policies.default.estimate import GapChoice, earliest
from umem.policies.default.writeback import NEVER, Quiet, quiet_times
from umem.trace.step_trace import StepTrace


class Copies:
    """The valid copies on the host, and the order in which the idle link makes others."""

    def __init__(self, quiet: Quiet, out_us: list[float], n_ops: int) -> None:
        self.quiet, self.out_us, self.n = quiet, out_us, n_ops
        self.valid_in = [-1] * len(out_us)  # the step in which the quiet time ends
        self.done = [0.0] * len(out_us)
        self.started = [NEVER] * len(out_us)
        self.waiting: list[tuple[int, int, int]] = []  # (due, which, step)
        for which, written in enumerate(quiet.written.tolist()):
            if written < -1:
                self._wait(which, 0)

    def ready(self, which: int, op: int) -> float | None:
        valid = which >= 0 and self.valid_in[which] == self._step(which, op)
        return self.done[which] if valid else None

    def moved(self, which: int, op: int, when: float) -> None:
        if which >= 0:
            self.valid_in[which], self.done[which] = self._step(which, op), when

    def fill(self, op: int, free: float, end: float) -> float:
        for which, written in enumerate(self.quiet.written.tolist()):
            if (written + 1 - op) % self.n == 0:
                self._wait(which, self._step(which, op - 1))
        while self.waiting and free < end:
            due, which, step = first = min(self.waiting)
            self.waiting.remove(first)
            if due >= op and self.valid_in[which] != step:
                free += self.out_us[which]
                self.valid_in[which], self.done[which] = step, free
                self.started[which] = op - step * self.n
        return free

    def _wait(self, which: int, step: int) -> None:
        due = int(self.quiet.due[which])
        if due > self.quiet.written[which]:
            self.waiting.append((due + step * self.n, which, step))

    def _step(self, which: int, op: int) -> int:
        return (op - int(self.quiet.written[which])) // self.n


class Host:
    """The host's work on parameters that have left with their gradients."""

    def __init__(self, choice: GapChoice) -> None:
        self.rows = list(zip(*(column.tolist() for column in choice.updates), strict=True))
        self.due = choice.away.end.tolist()
        self.left = [set[int]() for _ in self.rows]
        self.number = [-1] * len(self.rows)
        self.work: list[tuple[float, float, float]] = []  # (ready, due, µs)
        self.end: dict[int, float] = {}
        self.free = 0.0

    def leaves(self, gap: int, begin: int, departure: list[float]) -> None:
        mine = [k for k, row in enumerate(self.rows) if gap in row[:2]]
        for k in sorted(mine, key=lambda k: (self.rows[k][0] != gap, k)):
            parameter, gradient, us = self.rows[k]
            self.left[k].add(gap)
            if self.left[k] == {parameter, gradient}:
                self.left[k].clear()
                self.number[k] = len(self.work)
                ready = max(departure[parameter], departure[gradient])
                self.work.append((ready, float(self.due[parameter] + begin), us))

    def ready(self, gap: int, departed: float) -> float:
        mine = [self.number[k] for k, row in enumerate(self.rows) if row[0] == gap]
        for number in [n for n in mine if n >= 0]:
            while number not in self.end:
                open_ = [i for i in range(len(self.work)) if i not in self.end]
                there = [i for i in open_ if self.work[i][0] <= self.free]
                if there:
                    i = min(there, key=lambda i: self.work[i][1])
                else:
                    i = min(open_, key=lambda i: self.work[i][:2])
                self.free = self.end[i] = max(self.free, self.work[i][0]) + self.work[i][2]
            departed = max(departed, self.end[number])
        return departed


def estimate(
    trace: StepTrace, device: DeviceProfile, choice: GapChoice, room: int
) -> tuple[float, list[int]]:
    """The time of the second of two equal steps in µs, and where each copy is begun."""
    away, returns = choice.away, choice.returns
    n, amount = trace.n_ops, trace.bytes[away.tensor]
    ready, taken = earliest(choice, amount, room)
    out_us = np.where(trace.clean[away.tensor], 0.0, amount / device.bytes_per_us_out).tolist()
    in_us = (amount / device.bytes_per_us_in).tolist()
    room_us = (amount / device.bytes_per_us_out).tolist()
    leaves, starts, needs = defaultdict(list), defaultdict(list), defaultdict(list)
    for gap, start in enumerate(away.start.tolist()):
        leaves[(start + 1) % n].append(gap)
    # By deadline, counted from the step that the return starts in.
    rows = [
        (int(away.end[gap]) - n * (start >= n), start, gap)
        for gap, start in zip(returns.tolist(), ready.tolist(), strict=True)
    ]
    for _, start, gap in sorted(rows, key=lambda row: row[0]):
        starts[start % n].append(gap)
        needs[int(away.end[gap]) % n].append(gap)
    slack = (np.maximum(room - taken, 0) / device.bytes_per_us_out).tolist()
    quiet = quiet_times(trace, away)
    copies = Copies(quiet, (trace.bytes[quiet.tensor] / device.bytes_per_us_out).tolist(), n)
    host = Host(choice)
    departure, arrival = [0.0] * len(amount), [0.0] * len(amount)
    now = out_free = in_free = begin = left = 0.0
    for point in range(2 * n):
        op, ended = point % n, now
        begin = now if op == 0 else begin
        for gap in leaves[op]:
            copied = copies.ready(int(quiet.of_gap[gap]), point - 1)
            if copied is not None:
                departure[gap] = max(now, copied)
            else:
                left = out_free = departure[gap] = max(out_free, now) + out_us[gap]
                copies.moved(int(quiet.of_gap[gap]), point - 1, left)
            host.leaves(gap, point - op, departure)
        later = sum(room_us[gap] for gap in starts[op])
        for gap in starts[op]:
            later -= room_us[gap]
            empty = max(now, left - slack[op] - later)
            in_free = arrival[gap] = (
                max(in_free, host.ready(gap, departure[gap]), empty) + in_us[gap]
            )
        now = max([now, left - slack[op], *(arrival[gap] for gap in needs[op])])
        out_free = copies.fill(point, max(out_free, ended), now + float(trace.op_us[op]))
        now += float(trace.op_us[op])
    return now - begin, copies.started
