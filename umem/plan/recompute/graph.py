"""The forward pass as values and the ops that make them: what can be computed again, from what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...policies.phases import phases
from ...trace.step import Bools, Floats, Ints, Kind, StepTrace

# Autograd lets go of what it saved a few ops after its use; what lives longer the program holds.
_SLACK_OPS = 8


class Value(NamedTuple):
    """A tensor as its `version`-th write left it; 0 is what it held before the step."""

    tensor: int
    version: int


class Graph:
    """What the ops of a step's forward passes read and write, by versions of tensors.

    A tensor is made by the forward op that it is first written in; ops that write it later change
    it in place. Tensors that no forward op makes are given: parameters, inputs.
    """

    def __init__(self, step: StepTrace, forward: Bools | None = None) -> None:
        """`forward`: [n] whether each op is of a forward pass; None: those before backward."""
        self.step = step
        n, m = step.n_ops, step.n_tensors
        self.forward: Bools = (
            np.arange(n) < phases(step).backward if forward is None else np.asarray(forward, bool)
        )
        self.writers: list[list[int]] = [[] for _ in range(m)]  # forward ops, ascending
        self.inputs: list[list[Value]] = [[] for _ in range(n)]  # of forward ops
        self.outputs: list[list[Value]] = [[] for _ in range(n)]
        self.last_forward = np.full(m, -1, np.int64)  # the last forward op that accesses it
        self.wanted: list[list[int]] = [[] for _ in range(n)]  # made tensors that other ops read
        self.saved: Bools = np.zeros(m, bool)  # made, and read after
        self._spoiled_at = np.full(m, n, np.int64)  # the first other op that writes it
        self._read_columns()
        self.last_wanted = max((i for i, tensors in enumerate(self.wanted) if tensors), default=-1)
        self._spoiled: Bools = self._spoiled_at <= self.last_wanted
        self.again: Bools = self._again()
        # Large made tensors that can be made again and that nothing but the step's ops holds.
        self.may_drop: Bools = self._may_drop()
        self.siblings: list[list[int]] = [[] for _ in range(m)]  # that the same op makes
        for values in self.outputs:
            large = [value.tensor for value in values if step.large[value.tensor]]
            for tensor in large[: len(large) * (len(large) > 1)]:
                self.siblings[tensor] += [other for other in large if other != tensor]
        self.droppable: Bools = self.saved & self.may_drop

    def is_made(self, tensor: int) -> bool:
        """Whether a forward op makes it."""
        writers = self.writers[tensor]
        return bool(writers) and bool(self.step.first[tensor] == writers[0])

    def final(self, tensor: int) -> Value:
        """What the forward pass leaves of the tensor."""
        return Value(tensor, len(self.writers[tensor]))

    def writer(self, value: Value) -> int:
        """The op that made the value."""
        return self.writers[value.tensor][value.version - 1]

    def ops_of(self, tensors: Iterable[int]) -> set[int]:
        """The forward ops that write these tensors."""
        return {op for tensor in tensors for op in self.writers[tensor]}

    def own_us(self, tensor: int, kept: Sequence[bool] | Bools) -> tuple[float, set[int]]:
        """The time to rebuild a tensor where all that is saved or `kept` is there; and its ops."""
        ops: set[int] = set()
        stack = list(self.writers[tensor])
        while stack:
            op = stack.pop()
            if op in ops:
                continue
            ops.add(op)
            for value in self.inputs[op]:
                if value.tensor == tensor or not self.again_made[value.tensor]:
                    continue
                if self.saved[value.tensor] or kept[value.tensor]:
                    if value == self.final(value.tensor):
                        continue
                stack.extend(self.writers[value.tensor][: value.version])
        return float(sum(self.step.op_us[op] for op in ops)), ops

    def flow_bytes(self) -> Ints:
        """[n] Bytes of large made tensors that forward ops both up to and after each op access."""
        step = self.step
        made = np.flatnonzero(self.made & step.large)
        change = np.zeros(step.n_ops + 1, np.int64)
        np.add.at(change, step.first[made], step.bytes[made])
        np.add.at(change, self.last_forward[made], -step.bytes[made])
        return np.cumsum(change)[:-1]

    def flow(self, op: int) -> Ints:
        """The large made tensors that forward ops both up to and after `op` access."""
        first, last = self.step.first, self.last_forward
        return np.flatnonzero(self.made & self.step.large & (first <= op) & (last > op))

    def _read_columns(self) -> None:
        step = self.step
        tensors, writes = step.access_tensor.tolist(), step.access_write.tolist()
        starts, first = step.access_start.tolist(), step.first.tolist()
        transient = step.kind == Kind.TRANSIENT
        for op, forward in enumerate(self.forward.tolist()):
            for tensor, write in zip(
                tensors[starts[op] : starts[op + 1]],
                writes[starts[op] : starts[op + 1]],
                strict=True,
            ):
                writers = self.writers[tensor]
                if not forward:
                    if write:
                        self._spoiled_at[tensor] = min(self._spoiled_at[tensor], op)
                    elif self.is_made(tensor):
                        self.saved[tensor] = transient[tensor]
                        self.wanted[op].append(tensor)
                    continue
                self.last_forward[tensor] = op
                made_now = write and not writers and first[tensor] == op
                if not made_now:
                    self.inputs[op].append(Value(tensor, len(writers)))
                if write:
                    writers.append(op)
                    self.outputs[op].append(Value(tensor, len(writers)))
        self.made: Bools = np.array([self.is_made(t) for t in range(step.n_tensors)], bool)

    def _again(self) -> Bools:
        """[n] Whether a forward op can run again in backward, given what the pass has left.

        Not one that changes what it did not make, nor one that reads what was overwritten since
        and cannot itself be made again.
        """
        again: Bools = np.zeros(self.step.n_ops, bool)
        self.again_made: Bools = np.zeros(self.step.n_tensors, bool)
        made, alive_later = self.made, self.step.kind != Kind.TRANSIENT
        for op in np.flatnonzero(self.forward).tolist():
            again[op] = all(made[v.tensor] for v in self.outputs[op]) and all(
                value == self.final(value.tensor)
                or (made[value.tensor] and all(again[self.writers[value.tensor][: value.version]]))
                for value in self.inputs[op]
            )
            again[op] &= not any(self._spoiled[v.tensor] for v in self.inputs[op])
        for tensor in np.flatnonzero(made & ~alive_later).tolist():
            self.again_made[tensor] = all(again[self.writers[tensor]])
        return again

    def _may_drop(self) -> Bools:
        step = self.step
        last_use = np.full(step.n_tensors, -1, np.int64)
        np.maximum.at(last_use, step.access_tensor, step.access_op)
        free = ~self.saved | (step.last <= last_use + _SLACK_OPS)
        return self.again_made & ~self._spoiled & free & step.large

    def cost_per_byte(self, tensors: Ints, kept: Bools) -> Floats:
        """µs a byte to rebuild each of the tensors from what is saved."""
        own = [self.own_us(tensor, kept)[0] for tensor in tensors.tolist()]
        return np.array(own) / np.maximum(self.step.bytes[tensors], 1)
