"""The forward pass as a graph of values and ops: recomputable values, and their sources."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...policies.published.phases import phases
from ...trace.step_trace import Bools, Floats, Ints, Kind, StepTrace

# Autograd releases saved tensors a few ops after their use; the program holds those alive longer.
_SLACK_OPS = 8


class RecomputeGraph:
    """The graph of a step's forward passes: the values that ops read and write.

    The forward op that writes a tensor first makes it; later writes change it in place. No forward
    op makes parameters and inputs. A value is a version of a tensor after one of its writes. Values
    are numbered, in ascending order per tensor.
    """

    def __init__(self, step: StepTrace, forward: Bools | None = None) -> None:
        """Build the graph.

        Args:
            step: the step.
            forward: whether each op belongs to a forward pass, [n]; None: all before backward.
        """
        self.step = step
        n, m = step.n_ops, step.n_tensors
        self.forward: Bools = (
            np.arange(n) < phases(step).backward if forward is None else np.asarray(forward, bool)
        )
        # For each value: its tensor, the op that wrote it (-1: none of this pass), and whether that
        # op made the tensor. Value t is tensor t before the step.
        self.tensor_of = list(range(m))
        self.writer = [-1] * m
        self.is_first = [False] * m
        self.final = list(range(m))  # per tensor: its value after the forward pass
        self.writers: list[list[int]] = [[] for _ in range(m)]  # forward ops, ascending
        self.inputs: list[list[int]] = [[] for _ in range(n)]  # per op: values it reads
        self.outputs: list[list[int]] = [[] for _ in range(n)]
        self.last_forward = np.full(m, -1, np.int64)  # the last forward op that accesses it
        self.wanted_at: list[tuple[int, list[int]]] = []  # other ops and their made tensors
        self.made: Bools = np.zeros(m, bool)
        self.saved: Bools = np.zeros(m, bool)  # made, and read after forward
        self._spoiled_at = np.full(m, n, np.int64)  # the first non-forward op that writes it
        self._read_columns()
        self.last_wanted = self.wanted_at[-1][0] if self.wanted_at else -1
        # Large tensors that can be rebuilt, and that the program does not hold after their use.
        self.may_drop: list[bool] = self._may_drop().tolist()
        self.droppable: Bools = self.saved & np.array(self.may_drop, bool)
        self.siblings: list[list[int]] = [[] for _ in range(m)]  # made by the same op
        self.temporaries: list[list[int]] = [[] for _ in range(m)]  # its sources
        self._relate()

    def ops_of(self, tensors: Iterable[int]) -> set[int]:
        """Return the forward ops that write these tensors."""
        return {op for tensor in tensors for op in self.writers[tensor]}

    def own_us(self, tensor: int, keep: Bools) -> float:
        """Return the µs to rebuild a tensor from saved tensors and those in `keep`."""
        ops: set[int] = set()
        stack, seen = [tensor], {tensor}
        while stack:
            now = stack.pop()
            ops.update(self.writers[now])
            for source in self.temporaries[now]:
                if source not in seen and not keep[source]:
                    seen.add(source)
                    stack.append(source)
        return float(sum(self._us[op] for op in ops))

    def sources(self, tensor: int) -> set[int]:
        """Return the saved tensors that a tensor is rebuilt from, directly or by temporaries."""
        stack, seen = [tensor], {tensor}
        found: set[int] = set()
        while stack:
            now = stack.pop()
            for op in self.writers[now]:
                found.update(map(self.tensor_of.__getitem__, self.inputs[op]))
            stack += [t for t in self.temporaries[now] if t not in seen]
            seen.update(self.temporaries[now])
        return {t for t in found - {tensor} if self.saved[t]}

    def first_wanted(self) -> Ints:
        """Return the first op after forward that reads each tensor, n where none does, [m]."""
        first = np.full(self.step.n_tensors, self.step.n_ops, np.int64)
        for op, tensors in reversed(self.wanted_at):
            first[tensors] = op
        return first

    def flow_bytes(self) -> Ints:
        """Return at each op the bytes of large tensors made so far that forward ops need, [n]."""
        step = self.step
        made = np.flatnonzero(self.made & step.large)
        change = np.zeros(step.n_ops + 1, np.int64)
        np.add.at(change, step.first[made], step.bytes[made])
        np.add.at(change, self.last_forward[made], -step.bytes[made])
        return np.cumsum(change)[:-1]

    def flow(self, op: int) -> Ints:
        """Return the large tensors made up to `op` that later forward ops access."""
        first, last = self.step.first, self.last_forward
        return np.flatnonzero(self.made & self.step.large & (first <= op) & (last > op))

    def _read_columns(self) -> None:
        step = self.step
        self._us: list[float] = step.op_us.tolist()
        tensors, writes = step.access_tensor.tolist(), step.access_write.tolist()
        starts, first = step.access_start.tolist(), step.first.tolist()
        transient = (step.kind == Kind.TRANSIENT).tolist()
        for op, forward in enumerate(self.forward.tolist()):
            wanted: list[int] = []
            for at in range(starts[op], starts[op + 1]):
                tensor, write = tensors[at], writes[at]
                if forward:
                    self.last_forward[tensor] = op
                    self._access(op, tensor, write, first[tensor])
                elif write:
                    self._spoiled_at[tensor] = min(self._spoiled_at[tensor], op)
                elif self.made[tensor]:
                    self.saved[tensor] = transient[tensor]
                    wanted.append(tensor)
            if wanted:
                self.wanted_at.append((op, wanted))

    def _access(self, op: int, tensor: int, write: bool, first: int) -> None:
        """Record an access by a forward op."""
        makes = write and not self.writers[tensor] and first == op
        if not makes:
            self.inputs[op].append(self.final[tensor])
        if not write:
            return
        self.made[tensor] |= makes
        self.final[tensor] = len(self.tensor_of)
        self.writers[tensor].append(op)
        self.outputs[op].append(self.final[tensor])
        self.tensor_of.append(tensor)
        self.writer.append(op)
        self.is_first.append(makes)

    def _again(self) -> Bools:
        """Return whether forward ops can rebuild each tensor in backward, [m].

        Ops cannot run again if they change a tensor that no forward op made, or if they read a
        value that has since been overwritten and cannot be rebuilt itself.
        """
        spoiled = self._spoiled_at <= self.last_wanted
        again = [False] * self.step.n_ops
        possible = [False] * len(self.tensor_of)  # per value: made only by ops that can run again
        for op in np.flatnonzero(self.forward).tolist():
            again[op] = all(self.made[self.tensor_of[v]] for v in self.outputs[op]) and all(
                (value == self.final[self.tensor_of[value]] or possible[value])
                and not spoiled[self.tensor_of[value]]
                for value in self.inputs[op]
            )
            sources = {self.tensor_of[value]: value for value in self.inputs[op]}
            for value in self.outputs[op]:
                before = sources.get(self.tensor_of[value])
                possible[value] = again[op] and (before is None or possible[before])
        able: Bools = np.array([possible[value] for value in self.final], bool)
        return np.asarray(self.made & ~spoiled & able, bool)

    def _may_drop(self) -> Bools:
        step = self.step
        last_use = np.full(step.n_tensors, -1, np.int64)
        np.maximum.at(last_use, step.access_tensor, step.access_op)
        free = ~self.saved | (step.last <= last_use + _SLACK_OPS)
        transient = step.kind == Kind.TRANSIENT
        return np.asarray(self._again() & free & step.large & transient, bool)

    def _relate(self) -> None:
        for values in self.outputs:
            large = [t for t in map(self.tensor_of.__getitem__, values) if self.step.large[t]]
            if len(large) > 1:
                for tensor in large:
                    self.siblings[tensor] += [other for other in large if other != tensor]
        for tensor in np.flatnonzero(self.made).tolist():
            values = [value for op in self.writers[tensor] for value in self.inputs[op]]
            sources = dict.fromkeys(map(self.tensor_of.__getitem__, values))
            self.temporaries[tensor] = [
                t for t in sources if self.may_drop[t] and not self.saved[t] and t != tensor
            ]

    def cost_per_byte(self, tensors: Ints, kept: Bools) -> Floats:
        """Return the µs per byte to rebuild each tensor from saved and `kept` tensors."""
        own = [self.own_us(tensor, kept) for tensor in tensors.tolist()]
        return np.array(own) / np.maximum(self.step.bytes[tensors], 1)
