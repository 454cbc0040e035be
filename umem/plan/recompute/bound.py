"""A step time that no plan of swapping and recomputing is below, by a linear program."""

from __future__ import annotations

import numpy as np

from ...devices import DeviceProfile
from ...trace.step import Bools, Ints
from ...units import MIB
from ..bounds import excess_bytes
from ..bounds_lp import Program, instants_of
from ..spans import Spans
from .candidates import Selection
from .graph import Graph

_US = 1000.0  # the program reckons in MiB and ms
_INSTANTS = 128


def lower_bound_us(
    graph: Graph, device: DeviceProfile, budget: int, *, time_limit_s: float = 60.0
) -> float:
    """The least step time in µs of plans that make a tensor again at most once.

    Variables: of each tensor that may be dropped the share y that is; of each temporary the share k
    that is kept, and d that is made again; of each forward op the share z that runs again; X_t
    bytes that are away by swapping at instant t. At each instant what is over the budget is dropped
    or away. z is at least the y and d of what the op makes, and d at least what is made from the
    temporary less k. What is away has left before its instant beside compute, and comes back after
    it beside compute and what runs again; else there is a stall. Minimises what runs again and the
    stall. A relaxation: copies, and chains of them, take no memory, and shares are no sets.

    Raises:
        PlanError: an op accesses more than the budget, or the time limit is over.
        NotSupportedError: scipy is not installed.
    """
    return Relaxation(graph, device, budget).least_us(time_limit_s=time_limit_s)


class Relaxation:
    """The program of `lower_bound_us`, to be solved more than once."""

    def __init__(self, graph: Graph, device: DeviceProfile, budget: int) -> None:
        spans = Spans(graph.step)
        over = excess_bytes(spans, budget)
        self.graph, self.program = graph, Program()
        self.over = spans.need - budget
        ops = np.flatnonzero(graph.forward)
        self.ops = dict(zip(ops.tolist(), self.program.variables(len(ops), upper=1.0), strict=True))
        self.again = self.program.variables(1, cost=1.0)  # ms
        self.stall = self.program.variables(1, cost=1.0)  # ms
        self._time_of_ops(ops)
        self.share: dict[int, Ints] = {}  # y of a saved tensor, d of a temporary
        self.kept: dict[int, Ints] = {}  # k
        for tensor in np.flatnonzero(graph.droppable).tolist():
            self._made_again(tensor)
        self.instants = instants_of(graph.step, spans.need, _INSTANTS, int(np.argmax(over)))
        self.right: dict[int, float] = {}
        self._memory()
        self._link(device, spans)

    def least_us(self, more: Ints | None = None, *, time_limit_s: float = 60.0) -> float:
        """The step time in µs; `more`: [n] bytes that each op needs besides."""
        over = self.over if more is None else self.over + more
        if over.max(initial=0) <= 0:
            self.program.values = np.zeros(self.program.n_variables)
            return self.graph.step.compute_us
        right = np.zeros(self.program.n_rows)
        right[list(self.right)] = list(self.right.values())
        right[self.memory] = -over[self.instants] / MIB
        least = self.program.minimum(at_most=right, time_limit_s=time_limit_s)
        return self.graph.step.compute_us + least * _US

    def selection(self, threshold: float) -> Selection:
        """The last solution's shares, rounded."""
        chosen = []
        for variables in (self.share, self.kept):
            picked: Bools = np.zeros(self.graph.step.n_tensors, bool)
            at = np.concatenate([*variables.values()]) if variables else np.zeros(0, np.int64)
            picked[list(variables)] = self.program.values[at] > threshold
            chosen.append(picked)
        return Selection(chosen[0] & self.graph.droppable, chosen[1])

    def _time_of_ops(self, ops: Ints) -> None:
        row = self.program.rows(1)
        self.program.add(row, self.again, -1.0)
        for op, us in zip(ops.tolist(), self.graph.step.op_us[ops].tolist(), strict=True):
            self.program.add(row, self.ops[op].reshape(1), us / _US)

    def _made_again(self, tensor: int) -> Ints:
        """The variable of what of a tensor is made again, with the rows of what that takes."""
        if tensor in self.share:
            return self.share[tensor]
        program = self.program
        share = self.share[tensor] = program.variables(1, upper=1.0)
        for op in self.graph.writers[tensor]:
            row = program.rows(1)  # share <= z
            program.add(row, share, 1.0)
            program.add(row, self.ops[op].reshape(1), -1.0)
        for source in self.graph.temporaries[tensor]:
            made = self._made_again(source)
            if source not in self.kept:
                self.kept[source] = program.variables(1, upper=1.0)
            row = program.rows(1)  # share - k <= d
            program.add(row, share, 1.0)
            program.add(row, self.kept[source], -1.0)
            program.add(row, made, -1.0)
        return share

    def _memory(self) -> None:
        """over - dropped + kept <= away."""
        program, step = self.program, self.graph.step
        row = self.memory = program.rows(len(self.instants))
        self.away = program.variables(len(self.instants))
        program.add(row, self.away, -1.0)
        begin, end = self.graph.last_forward, self._first_wanted()
        for sign, variables in ((-1.0, self.share), (1.0, self.kept)):
            for tensor, variable in variables.items():
                if sign < 0 and not self.graph.saved[tensor]:
                    continue
                inside = (self.instants > begin[tensor]) & (self.instants < end[tensor])
                count = int(inside.sum())
                size = sign * float(step.bytes[tensor]) / MIB
                program.add(row[inside], np.repeat(variable, count), size)

    def _first_wanted(self) -> Ints:
        """[m] The first op behind forward that needs a tensor, or what is made from it."""
        first = self.graph.first_wanted()
        for tensor in reversed(list(self.share)):  # what is made from others comes before them
            for source in self.graph.temporaries[tensor]:
                first[source] = min(first[source], first[tensor])
        for tensor in self.share:
            for source in self.graph.temporaries[tensor]:
                first[source] = min(first[source], first[tensor])
        return first

    def _link(self, device: DeviceProfile, spans: Spans) -> None:
        """What is away leaves before and comes back after, and both in each step."""
        program, step, at = self.program, self.graph.step, self.instants
        count = len(at)
        before, after = step.begin_us[at], step.compute_us - step.begin_us[at + 1]
        first_again = self.graph.wanted_at[0][0] if self.graph.wanted_at else step.n_ops
        waits = program.variables(count), program.variables(count)
        both = program.rows(count)  # stall before and after <= stall
        program.add(both, np.repeat(self.stall, count), -1.0)
        sides = (
            (device.bytes_per_us_out, before, spans.out_before, at >= first_again, spans.clean),
            (device.bytes_per_us_in, after, spans.in_later, at >= 0, np.zeros_like(spans.clean)),
        )
        for wait, (speed, beside, free, again, never) in zip(waits, sides, strict=True):
            mib_per_ms = speed * _US / MIB
            program.add(both, wait, 1.0)
            row = program.rows(count)
            program.add(row, self.away, 1.0)
            program.add(row, wait, -mib_per_ms)
            program.add(row[again], np.repeat(self.again, int(again.sum())), -mib_per_ms)
            room = free[at] / MIB + beside / _US * mib_per_ms
            self.right.update(zip(row.tolist(), room.tolist(), strict=True))
            row = program.rows(count)
            program.add(row, self.away, 1.0)
            for variable in (self.again, self.stall):
                program.add(row, np.repeat(variable, count), -mib_per_ms)
            room = never[at] / MIB + step.compute_us / _US * mib_per_ms
            self.right.update(zip(row.tolist(), room.tolist(), strict=True))
