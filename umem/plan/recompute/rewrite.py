"""A step with some of its forward pass's results dropped, and made again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ...trace.step import Bools, Ints, StepTrace
from .graph import Graph, Value
from .plan import Keep


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A step that runs some forward ops a second time.

    Tensors 0 to m-1 are those of the whole step, in its order; copies made again follow.
    """

    graph: Graph
    dropped: Bools  # [m] what is not kept for backward: saved tensors, and temporaries on the way
    mode: Keep
    origin: Ints  # [n'] the op of the whole step that each op is, or is again
    again: Bools  # [n'] whether it is run again
    copy_of: Ints  # [m'] the tensor of the whole step that each one is, or is a copy of
    step: StepTrace

    @property
    def recompute_us(self) -> float:
        """The time of all ops that run again."""
        return float(self.step.op_us[self.again].sum())

    @cached_property
    def drop_ops(self) -> tuple[int, ...]:
        """Ascending: the forward ops of which something is dropped."""
        return tuple(sorted(self.graph.ops_of(np.flatnonzero(self.dropped).tolist())))


def rewrite(graph: Graph, drop: Bools, keep: Bools, mode: Keep = "speed") -> Rewritten:
    """Drop tensors, and make them again before the first op in backward that reads them.

    What an op needs to run again is, in this order: kept, and its life is extended; a copy that is
    there already; made again itself, down to what is kept. Ops run again in the order of the
    forward pass, those that change a tensor in place too, on the copy.

    Args:
        graph: of the whole step.
        drop: [m] saved tensors that are not kept; those that are not `droppable` are.
        keep: [m] tensors that backward does not read and that are kept for making others from.
        mode: whether copies stay until nothing needs them, or until the op that wanted them ends.
    """
    return _Rewriter(graph, drop & graph.droppable, keep, mode).run()


@dataclass
class _Copy:
    """A tensor made again."""

    tensor: int
    version: int
    index: int  # among the tensors of the new step


@dataclass
class _Rewriter:
    graph: Graph
    drop: Bools
    keep: Bools
    mode: Keep
    origin: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)  # positions in `origin`
    copies: list[int] = field(default_factory=list)  # the tensor of each
    here: dict[int, _Copy] = field(default_factory=dict)  # the latest copy of each tensor
    used: dict[int, int] = field(default_factory=dict)  # the last use, by new op, of what is kept
    replaced: dict[int, dict[int, int]] = field(default_factory=dict)  # at a new op: tensor -> copy
    temporary: set[int] = field(default_factory=set)

    def run(self) -> Rewritten:
        graph, n = self.graph, self.graph.step.n_ops
        self.dropped = self._dropped()
        gone = self.dropped.tolist()
        before = 0
        for op, wanted in enumerate(graph.wanted):
            missing = [tensor for tensor in wanted if gone[tensor]]
            if not missing:
                continue
            self.origin.extend(range(before, op))
            before = op
            for again in self._needed([graph.final(tensor) for tensor in missing]):
                self._run_again(again)
            self.replaced[len(self.origin)] = {t: self.here[t].index for t in missing}
            if self.mode == "memory":
                self.here.clear()
        self.origin.extend(range(before, n))
        return self._build()

    def _dropped(self) -> Bools:
        """What is to be dropped, and the temporaries that it is made from again.

        An op's outputs go together: a plan says which ops to drop.
        """
        graph, keep = self.graph, self.keep.copy()
        dropped: Bools = np.zeros(len(keep), bool)
        stack = np.flatnonzero(self.drop).tolist()
        while stack:
            tensor = stack.pop()
            if dropped[tensor] or keep[tensor]:
                continue
            if any(keep[t] or not graph.may_drop[t] for t in graph.siblings[tensor]):
                keep[tensor] = True
                continue
            dropped[tensor] = True
            stack.extend(graph.siblings[tensor])
            for op in graph.writers[tensor]:
                sources = (value.tensor for value in graph.inputs[op])
                stack.extend(t for t in sources if graph.may_drop[t] and not graph.saved[t])
        return dropped

    def _needed(self, values: list[Value]) -> list[int]:
        """The forward ops that have to run again for these values, in order.

        A copy may have gone on from a version that is needed: then it is made anew.
        """
        graph = self.graph
        stack, seen, ops = list(values), set(values), set()
        while stack:
            value = stack.pop()
            if self._is_kept(value):
                continue
            copy = self.here.get(value.tensor)
            if copy is not None and copy.version == value.version:
                continue
            if copy is not None and copy.version > value.version:
                del self.here[value.tensor]
                later = Value(value.tensor, copy.version)
                stack.extend([later] * (later in seen))
            op = graph.writer(value)
            ops.add(op)
            sources = list(graph.inputs[op])
            stack.extend(source for source in sources if source not in seen)
            seen.update(sources)
        return sorted(ops)

    def _is_kept(self, value: Value) -> bool:
        """Whether the tensor itself still holds the value."""
        return not self.dropped[value.tensor] and value == self.graph.final(value.tensor)

    def _run_again(self, op: int) -> None:
        now = len(self.origin)
        self.again.append(now)
        self.origin.append(op)
        names: dict[int, int] = {}
        for value in self.graph.inputs[op]:
            if self._is_kept(value):
                self.used[value.tensor] = now
            else:
                names[value.tensor] = self.here[value.tensor].index
        for value in self.graph.outputs[op]:
            copy = self.here.get(value.tensor)
            if value.version == 1 or copy is None:
                copy = _Copy(value.tensor, 0, self.graph.step.n_tensors + len(self.copies))
                self.here[value.tensor] = copy
                self.copies.append(value.tensor)
            copy.version = value.version
            names[value.tensor] = copy.index
        self.replaced[now] = names

    def _build(self) -> Rewritten:
        """The columns of the new step."""
        step = self.graph.step
        origin = np.array(self.origin, np.int64)
        again: Bools = np.zeros(len(origin), bool)
        again[self.again] = True
        copy_of = np.concatenate((np.arange(step.n_tensors), np.array(self.copies, np.int64)))
        counts = np.diff(step.access_start)[origin]
        starts = np.concatenate(([0], np.cumsum(counts)))
        access = np.arange(starts[-1]) - np.repeat(starts[:-1] - step.access_start[origin], counts)
        tensor = step.access_tensor[access]
        for op, names in self.replaced.items():
            inside = tensor[starts[op] : starts[op + 1]]
            inside[:] = [names.get(t, t) for t in inside.tolist()]
        op = np.repeat(np.arange(len(origin)), counts)
        first, last = self._lives(np.flatnonzero(~again), op, tensor)
        made = StepTrace(
            op_us=step.op_us[origin],
            op_names=_picked(step.op_names, origin),
            bytes=step.bytes[copy_of],
            large=step.large[copy_of],
            tags=_picked(step.tags, copy_of),
            families=_picked(step.families, copy_of),
            kind=step.kind[copy_of],
            first=first,
            last=last,
            twin=np.concatenate((step.twin, np.full(len(self.copies), -1))),
            source=step.source[copy_of],
            access_start=starts,
            access_tensor=tensor,
            access_write=step.access_write[access],
        )
        return Rewritten(self.graph, self.dropped, self.mode, origin, again, copy_of, made)

    def _lives(self, place: Ints, op: Ints, tensor: Ints) -> tuple[Ints, Ints]:
        """First and last op of each tensor; `place`: where each op of the whole step is now."""
        step, graph = self.graph.step, self.graph
        gone = self.dropped & graph.saved
        ends = np.where(gone, np.maximum(graph.last_forward, step.first), step.last)
        first = np.concatenate((place[step.first], np.full(len(self.copies), len(self.origin))))
        last = np.concatenate((place[ends], np.zeros(len(self.copies), np.int64)))
        new = np.arange(step.n_tensors, len(first))
        np.minimum.at(first, tensor, op)
        first[: step.n_tensors] = place[step.first]
        used = np.full(len(first), -1, np.int64)
        np.maximum.at(used, tensor, op)
        last[new] = used[new]
        kept = np.array(list(self.used), np.int64)
        last[kept] = np.maximum(last[kept], used[kept])
        return first, last


def _picked(names: Sequence[str], index: Ints) -> tuple[str, ...]:
    return tuple(names[i] for i in index.tolist())
