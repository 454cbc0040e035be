"""A step time that no plan of swapping and recomputing is below, by a linear program."""

from __future__ import annotations

import numpy as np

from ...devices import DeviceProfile
from ...trace.step import Bools, Ints
from ...units import MIB
from ..bounds import excess_bytes
from ..bounds_lp import instants_of
from ..linear_program import Program
from ..spans import Spans
from .candidates import Selection
from .graph import Graph

_US = 1000.0  # the program reckons in MiB and ms
_INSTANTS = 128


def lower_bound_us(
    graph: Graph, device: DeviceProfile, budget: int, *, time_limit_s: float = 60.0
) -> float:
    """The least step time in µs of plans that make a tensor again once, when it is first needed.

    Variables: of each tensor that may be dropped the share y that is; of each temporary the share k
    that is kept, and d that is made again; of each forward op the share z that runs again; X_t
    bytes that are away by swapping at instant t. At each instant what is over the budget is dropped
    or away. z is at least the y and d of what the op makes, and d at least what is made from the
    temporary less k. What is away has left before its instant beside compute, and comes back after
    it beside compute and what runs again; else there is a stall: of the step as it is, and of the
    step taken to begin behind backward. What the program holds behind its last use is not dropped
    and never comes back. Minimises what runs again and the stall. A relaxation: copies, and chains
    of them, take no memory, and shares are no sets.

    Raises:
        PlanError: an op accesses more than the budget, or the time limit is over.
        NotSupportedError: highspy is not installed.
    """
    return Relaxation(graph, device, budget).least_us(time_limit_s=time_limit_s)


class Relaxation:
    """The program of `lower_bound_us`, to be solved more than once."""

    def __init__(self, graph: Graph, device: DeviceProfile, budget: int) -> None:
        spans = Spans(graph.step)
        over = excess_bytes(spans, budget)
        self.graph, self.program = graph, Program()
        self.tails = spans.tails(~graph.droppable)
        self.over = spans.need + self.tails - budget
        ops = np.flatnonzero(graph.forward)
        self.ops = dict(zip(ops.tolist(), self.program.variables(len(ops), upper=1.0), strict=True))
        self.again = self.program.variables(1, cost=1.0)  # ms
        self.stall = self.program.variables(1, cost=1.0)  # ms
        self._time_of_ops(ops)
        self.share: dict[int, Ints] = {}  # y of a saved tensor, d of a temporary
        self.kept: dict[int, Ints] = {}  # k
        for tensor in np.flatnonzero(graph.droppable).tolist():
            self._made_again(tensor)
        most = instants_of(graph.step, spans.need, _INSTANTS, int(np.argmax(over)))
        # Where all is dropped that may be, other ops need most.
        least = instants_of(graph.step, spans.need - self._droppable(), _INSTANTS, -1)
        self.instants = np.union1d(most, least)
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
        least = self.program.minimum(at_most=right, time_limit_s=time_limit_s, method="simplex")
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

    def _droppable(self) -> Ints:
        """[n] Bytes that dropping saves at each op, if all is dropped that may be."""
        step, tensors = self.graph.step, np.flatnonzero(self.graph.droppable)
        begin, end = self.graph.last_forward[tensors] + 1, self._first_wanted()[tensors]
        change = np.zeros(step.n_ops + 1, np.int64)
        np.add.at(change, begin, step.bytes[tensors])
        np.add.at(change, np.maximum(begin, end), -step.bytes[tensors])
        return np.cumsum(change)[:-1]

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

    def _again_by(self) -> Ints:
        """Of each instant the variable of the ms that have run again before it, at most.

        What runs again does so when backward first needs it.
        """
        program, graph = self.program, self.graph
        wanted, needed = self._first_wanted(), dict.fromkeys(self.ops, graph.step.n_ops)
        for tensor in self.share:
            for op in graph.writers[tensor]:
                needed[op] = min(needed[op], int(wanted[tensor]))
        place = np.searchsorted(self.instants, list(needed.values()))
        sums = program.variables(len(self.instants))
        row = program.rows(len(sums))  # sum - sum before - what is needed in between <= 0
        program.add(row, sums, 1.0)
        program.add(row[1:], sums[:-1], -1.0)
        for op, k in zip(needed, place.tolist(), strict=True):
            if k < len(sums):
                program.add(row[k : k + 1], self.ops[op].reshape(1), -graph.step.op_us[op] / _US)
        return sums

    def _link(self, device: DeviceProfile, spans: Spans) -> None:
        """What is away leaves before and comes back after, and both in each step."""
        again_by = self._again_by()
        for begin in sorted({0, (self.graph.last_wanted + 1) % self.graph.step.n_ops}):
            self._link_from(begin, device, spans, again_by)

    def _link_from(self, begin: int, device: DeviceProfile, spans: Spans, again_by: Ints) -> None:
        """The same of a step that is taken to begin at an op before or behind all that runs again.

        Behind it is the optimizer: what it writes leaves from there on only.
        """
        program, step, at = self.program, self.graph.step, self.instants
        count = len(at)
        before, after = (us[at] for us in spans.beside(begin))
        # Held, and written before the step begins: it may have left before.
        written = self.tails - spans.tails(~self.graph.droppable, begin)
        left = np.where(np.arange(step.n_ops) < begin, 0, written)
        waits = program.variables(count), program.variables(count)
        both = program.rows(count)  # stall before and after <= stall
        program.add(both, np.repeat(self.stall, count), -1.0)
        whole = np.repeat(self.again, count)
        sides = (
            (device.bytes_per_us_out, before, spans.out_since(begin) + left, again_by, spans.clean),
            (device.bytes_per_us_in, after, spans.in_until(begin) + self.tails, whole, self.tails),
        )
        for wait, (speed, beside, free, again, never) in zip(waits, sides, strict=True):
            mib_per_ms = speed * _US / MIB
            program.add(both, wait, 1.0)
            row = program.rows(count)
            program.add(row, self.away, 1.0)
            program.add(row, wait, -mib_per_ms)
            program.add(row, again, -mib_per_ms)
            room = free[at] / MIB + beside / _US * mib_per_ms
            self.right.update(zip(row.tolist(), room.tolist(), strict=True))
            row = program.rows(count)
            program.add(row, self.away, 1.0)
            for variable in (self.again, self.stall):
                program.add(row, np.repeat(variable, count), -mib_per_ms)
            room = never[at] / MIB + step.compute_us / _US * mib_per_ms
            self.right.update(zip(row.tolist(), room.tolist(), strict=True))
