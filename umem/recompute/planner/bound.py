"""A lower bound, from a linear program, of the step time of any plan to swap and recompute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from ...analysis.bounds import excess_bytes
from ...analysis.idle_intervals import IdleIntervals
from ...analysis.linear_program import LinearProgram
from ...analysis.turning_points import instants_of
from ...base.device_profiles import DeviceProfile
from ...base.units import MIB
from ...trace.step_trace import Floats, Ints
from .bound_updates import UpdateTerms
from .graph import RecomputeGraph
from .host_updates import Update

_US = 1000.0  # the program uses MiB and ms
_INSTANTS = 128


def lower_bound_us(
    graph: RecomputeGraph,
    device: DeviceProfile,
    budget: int,
    updates: Sequence[Update] = (),
    *,
    time_limit_s: float = 60.0,
) -> float:
    """Return the min step time in µs of plans that rebuild tensors when backward needs them.

    Variables: for each droppable tensor, the dropped share y; for each temporary, the kept share k
    and the rebuilt share d; for each forward op, the share z that runs again; X_t, the bytes
    swapped out at instant t. At each instant the excess over the budget is dropped or swapped out.
    z is at least the y and d of the op's results, and d at least the share of the tensors made from
    the temporary, less k. Swapped bytes leave before their instant while compute runs, and return
    after it while compute and recomputation run; else there is a stall. This applies to the step as
    it is, and to the step taken to start after backward. Tensors that the program keeps after their
    last use are not dropped and never return. The program minimises recomputation time and the
    stall. For each tensor and pause between two ops of backward that read it, a share f is freed
    and rebuilt at the second one, at no less than the time of the ops that write it. It is a
    relaxation: rebuilt copies, and chains of them, take no memory, and shares are fractions rather
    than sets of tensors.

    With `updates`, the host does a share u of each: its ops take less time on the device, its
    states no memory, the gradient leaves immediately, and the parameter is away from its last use
    to its first one. Per step all these gradients leave, all these parameters return, and the
    host's lane takes all the updates' time.

    Raises:
        PlanError: an op accesses more than the budget, or the time limit was reached.
        NotSupportedError: highspy is not installed.
    """
    return _Relaxation(graph, device, budget, updates).min_us(time_limit_s)


class _Relaxation:
    """The linear program of `lower_bound_us`."""

    def __init__(
        self,
        graph: RecomputeGraph,
        device: DeviceProfile,
        budget: int,
        updates: Sequence[Update],
    ) -> None:
        # Droppable tensors are in no such variable; the memory rows count them.
        spans = IdleIntervals(graph.step, kept=~np.array(graph.may_drop, bool))
        over = excess_bytes(spans, budget)
        self.graph, self.program = graph, LinearProgram()
        self.over = spans.need - budget
        self.terms = UpdateTerms(spans, device, tuple(updates))
        us = self.terms.device_us
        self.updated = self.program.variables(len(updates), cost=-us / _US, upper=1.0)
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
        # With all droppable tensors dropped, other ops need the most.
        least = instants_of(graph.step, spans.need - self._droppable(), _INSTANTS, -1)
        self.instants = np.union1d(most, least)
        if updates:
            every = self.terms.needed(np.arange(graph.step.n_ops)).sum(axis=0)
            for need in (spans.need - every, spans.need - every - self._droppable()):
                more = instants_of(graph.step, need, _INSTANTS, -1)
                self.instants = np.union1d(self.instants, more)
        self.right: dict[int, float] = {}
        self._memory()
        self.pauses = list(self._pauses())
        self._link(device, spans)

    def min_us(self, time_limit_s: float) -> float:
        """Return the min step time in µs."""
        if self.over.max(initial=0) <= 0 and not len(self.updated):
            return self.graph.step.compute_us
        right = np.zeros(self.program.n_rows)
        right[list(self.right)] = list(self.right.values())
        right[self.memory] = -self.over[self.instants] / MIB
        least = self.program.minimum(at_most=right, time_limit_s=time_limit_s, method="simplex")
        return self.graph.step.compute_us + least * _US

    def _time_of_ops(self, ops: Ints) -> None:
        row = self.time = self.program.rows(1)
        self.program.add(row, self.again, -1.0)
        for op, us in zip(ops.tolist(), self.graph.step.op_us[ops].tolist(), strict=True):
            self.program.add(row, self.ops[op].reshape(1), us / _US)

    def _made_again(self, tensor: int) -> Ints:
        """Return the variable of a tensor's rebuilt share; add it and its rows if it is new."""
        program = self.program
        new, todo = [], [tensor]
        for one in todo:  # the list grows by the temporaries, which may be a long chain
            if one in self.share:
                continue
            new.append(one)
            share = self.share[one] = program.variables(1, upper=1.0)
            for op in self.graph.writers[one]:
                row = program.rows(1)  # share <= z
                program.add(row, share, 1.0)
                program.add(row, self.ops[op].reshape(1), -1.0)
            todo += self.graph.temporaries[one]
        for one in new:
            for source in self.graph.temporaries[one]:
                if source not in self.kept:
                    self.kept[source] = program.variables(1, upper=1.0)
                row = program.rows(1)  # share - k <= d
                program.add(row, self.share[one], 1.0)
                program.add(row, self.kept[source], -1.0)
                program.add(row, self.share[source], -1.0)
        return self.share[tensor]

    def _droppable(self) -> Ints:
        """Return the bytes saved at each op if all droppable tensors are dropped, [n]."""
        step, tensors = self.graph.step, np.flatnonzero(self.graph.droppable)
        begin, end = self.graph.last_forward[tensors] + 1, self._first_wanted()[tensors]
        change = np.zeros(step.n_ops + 1, np.int64)
        np.add.at(change, begin, step.bytes[tensors])
        np.add.at(change, np.maximum(begin, end), -step.bytes[tensors])
        return np.cumsum(change)[:-1]

    def _memory(self) -> None:
        """Add the memory rows: over - dropped + kept <= swapped out."""
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
        self._minus(row, self.terms.needed(self.instants) / MIB)

    def _pauses(self) -> Iterator[tuple[int, Ints, float]]:
        """Add the shares f; yield for each the op at which it is rebuilt, the variable, and its ms.

        An op that makes several tensors runs once for all of them: each has a part of its time.
        """
        program, graph, step = self.program, self.graph, self.graph.step
        used: dict[int, list[int]] = {}
        for op, tensors in graph.wanted_at:
            for tensor in tensors:
                used.setdefault(tensor, []).append(op)
        for tensor in np.flatnonzero(graph.droppable).tolist():
            ops, size = used[tensor], float(step.bytes[tensor]) / MIB
            ms = sum(step.op_us[op] / len(graph.outputs[op]) for op in graph.writers[tensor]) / _US
            for begin, end in pairwise(ops):
                inside = self.memory[(self.instants > begin) & (self.instants < end)]
                if not len(inside):
                    continue
                freed = program.variables(1, upper=1.0)
                row = program.rows(1)  # freed - share <= 0
                program.add(row, freed, 1.0)
                program.add(row, self.share[tensor], -1.0)
                program.add(self.time, freed, ms)
                program.add(inside, np.repeat(freed, len(inside)), -size)
                yield end, freed, ms

    def _minus(self, row: Ints, less: Floats) -> None:
        """Add to the left side of rows a negative term per share of an update, [u, rows]."""
        for variable, amounts in zip(self.updated, less, strict=True):
            used = np.flatnonzero(amounts)
            self.program.add(row[used], np.repeat(variable, len(used)), -amounts[used])

    def _first_wanted(self) -> Ints:
        """Return the first op after forward that needs a tensor, or a tensor made from it, [m]."""
        first = self.graph.first_wanted()
        todo = list(self.share)
        while todo:
            tensor = todo.pop()
            for source in self.graph.temporaries[tensor]:
                if first[tensor] < first[source]:
                    first[source] = first[tensor]
                    todo.append(source)
        return first

    def _again_by(self) -> Ints:
        """Add and return the variables of the max ms of recomputation before each instant.

        An op runs again when backward first needs its result.
        """
        program, graph = self.program, self.graph
        wanted, needed = self._first_wanted(), dict.fromkeys(self.ops, graph.step.n_ops)
        for tensor in self.share:
            for op in graph.writers[tensor]:
                needed[op] = min(needed[op], int(wanted[tensor]))
        place = np.searchsorted(self.instants, list(needed.values()))
        sums = program.variables(len(self.instants))
        row = program.rows(len(sums))  # sum - previous sum - time of the ops in between <= 0
        program.add(row, sums, 1.0)
        program.add(row[1:], sums[:-1], -1.0)
        for op, k in zip(needed, place.tolist(), strict=True):
            if k < len(sums):
                program.add(row[k : k + 1], self.ops[op].reshape(1), -graph.step.op_us[op] / _US)
        for op, freed, ms in self.pauses:
            k = int(np.searchsorted(self.instants, op))
            if k < len(sums):
                program.add(row[k : k + 1], freed, -ms)
        return sums

    def _link(self, device: DeviceProfile, spans: IdleIntervals) -> None:
        """Add the link rows: swapped bytes leave before their instant and return after it."""
        again_by = self._again_by()
        self._host()
        for begin in sorted({0, (self.graph.last_wanted + 1) % self.graph.step.n_ops}):
            self._link_from(begin, device, spans, again_by)

    def _host(self) -> None:
        """Add the row of the host's lane, which takes no longer than the step."""
        if not len(self.updated):
            return
        row = self.program.rows(1)
        for variable in (self.again, self.stall):
            self.program.add(row, variable, -1.0)
        taken = (self.terms.host_us + self.terms.device_us) / _US
        self._minus(row, -taken[:, None])
        self.right[int(row[0])] = self.graph.step.compute_us / _US

    def _link_from(
        self, begin: int, device: DeviceProfile, spans: IdleIntervals, again_by: Ints
    ) -> None:
        """Add these rows for a step taken to start at op `begin`, before or after recomputation.

        The optimizer follows it; its results cannot leave earlier.
        """
        program, step, at = self.program, self.graph.step, self.instants
        count = len(at)
        before, after = (us[at] for us in spans.beside(begin))
        waits = program.variables(count), program.variables(count)
        both = program.rows(count)  # stall before and after <= stall
        program.add(both, np.repeat(self.stall, count), -1.0)
        whole = np.repeat(self.again, count)
        terms, all_us = self.terms, self.terms.device_us[:, None]
        # Update terms: their ops' overlapping time, their free states, and the moved bytes.
        less_before, less_after = terms.times_beside(begin, at)
        moved = np.repeat(terms.bytes[:, None], count, axis=1) / MIB
        clean = terms.idle_parameters(at) / MIB
        left = terms.idle_gradients(at) / MIB
        sides = (
            (device.bytes_per_us_out, before, spans.out_since(begin), again_by, spans.clean,
             less_before, terms.written_before(begin, at) / MIB - clean, moved - clean - left),
            (device.bytes_per_us_in, after, spans.in_until(begin), whole, spans.unread,
             less_after, terms.used_after(begin, at) / MIB, moved),
        )  # fmt: skip
        for wait, side in zip(waits, sides, strict=True):
            speed, beside, free, again, never, less, fewer, total = side
            mib_per_ms = speed * _US / MIB
            program.add(both, wait, 1.0)
            row = program.rows(count)
            program.add(row, self.away, 1.0)
            program.add(row, wait, -mib_per_ms)
            program.add(row, again, -mib_per_ms)
            self._minus(row, -(less / _US * mib_per_ms + fewer))
            room = free[at] / MIB + beside / _US * mib_per_ms
            self.right.update(zip(row.tolist(), room.tolist(), strict=True))
            row = program.rows(count)
            program.add(row, self.away, 1.0)
            self._minus(row, -(all_us / _US * mib_per_ms + total))
            for variable in (self.again, self.stall):
                program.add(row, np.repeat(variable, count), -mib_per_ms)
            room = never[at] / MIB + step.compute_us / _US * mib_per_ms
            self.right.update(zip(row.tolist(), room.tolist(), strict=True))
