"""A step with some of its forward pass's results dropped, and made again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...trace.step import Bools, Ints, StepTrace
from .graph import Graph
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

    @property
    def behind_backward(self) -> int:
        """The first op that needs nothing of the forward pass: the optimizer; 0: there is none."""
        op = int(np.searchsorted(self.origin[~self.again], self.graph.last_wanted, side="right"))
        behind = np.flatnonzero(~self.again)[op:]
        return int(behind[0]) if len(behind) else 0

    @cached_property
    def drop_ops(self) -> tuple[int, ...]:
        """Ascending: the forward ops of which something is dropped."""
        return tuple(sorted(self.graph.ops_of(np.flatnonzero(self.dropped).tolist())))


def rewrite(
    graph: Graph, drop: Bools, keep: Bools, mode: Keep = "speed", *, labels: bool = True
) -> Rewritten:
    """Drop tensors, and make them again before the first op in backward that reads them.

    What an op needs to run again is, in this order: kept, and its life is extended; a copy that is
    there already; made again itself, down to what is kept. Ops run again in the order of the
    forward pass, those that change a tensor in place too, on the copy.

    Args:
        graph: of the whole step.
        drop: [m] saved tensors that are not kept; those that are not `droppable` are.
        keep: [m] tensors that backward does not read and that are kept for making others from.
        mode: whether copies stay until nothing needs them, or until the op that wanted them ends.
        labels: whether ops and tensors of the new step have their names; a search does without.
    """
    rewriter = _Rewriter(graph, drop, keep, mode)
    rewriter.run()
    return rewriter.build(labels)


class _Rewriter:
    """Values are numbers of `graph.values`."""

    def __init__(self, graph: Graph, drop: Bools, keep: Bools, mode: Keep) -> None:
        self.graph, self.mode, self.count = graph, mode, graph.step.n_tensors
        self.dropped = dropped_by(graph, drop, keep)
        self.gone: list[bool] = self.dropped.tolist()
        self.before: list[int] = []  # of each op run again the op that it comes before
        self.again: list[int] = []
        self.copies: list[int] = []  # the tensor of each
        self.here: dict[int, int] = {}  # the latest copy of each tensor
        self.holds: dict[int, int] = {}  # the value that it holds
        # Of ops run again, by their place in `again`, and of others: the copies that they access.
        self.names: list[dict[int, int]] = []
        self.wanted: dict[int, dict[int, int]] = {}

    def run(self) -> None:
        graph, gone, here, holds = self.graph, self.gone, self.here, self.holds
        final = graph.final
        for op, wanted in graph.wanted_at:
            missing = [tensor for tensor in wanted if gone[tensor]]
            if not missing:
                continue
            # Most ops want what another one has had made.
            if any(holds.get(tensor) != final[tensor] for tensor in missing):
                for again in self._needed([final[tensor] for tensor in missing]):
                    self.before.append(op)
                    self._run_again(again)
            self.wanted[op] = {tensor: here[tensor] for tensor in missing}
            if self.mode == "memory":
                here.clear()
                holds.clear()

    def _needed(self, values: list[int]) -> list[int]:
        """The forward ops that have to run again for these values, in order.

        A copy may have gone on from a version that is needed: then it is made anew.
        """
        graph, gone, holds = self.graph, self.gone, self.holds
        tensor_of, final, writer = graph.tensor_of, graph.final, graph.writer
        stack, seen, ops = list(values), set(values), set()
        while stack:
            value = stack.pop()
            tensor = tensor_of[value]
            if not gone[tensor] and value == final[tensor]:
                continue
            held = holds.get(tensor)
            if held == value:
                continue
            if held is not None and held > value:
                del holds[tensor]
                if held in seen:
                    stack.append(held)
            op = writer[value]
            if op in ops:
                continue
            ops.add(op)
            for source in graph.inputs[op]:
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return sorted(ops)

    def _run_again(self, op: int) -> None:
        graph, gone, here, holds = self.graph, self.gone, self.here, self.holds
        tensor_of, final = graph.tensor_of, graph.final
        names: dict[int, int] = {}
        for value in graph.inputs[op]:
            tensor = tensor_of[value]
            if gone[tensor] or value != final[tensor]:
                names[tensor] = here[tensor]
        for value in graph.outputs[op]:
            tensor = tensor_of[value]
            if graph.is_first[value] or tensor not in holds:
                here[tensor] = self.count + len(self.copies)
                self.copies.append(tensor)
            holds[tensor] = value
            names[tensor] = here[tensor]
        self.names.append(names)
        self.again.append(op)

    def build(self, labels: bool) -> Rewritten:
        """The columns of the new step."""
        step = self.graph.step
        origin = np.insert(np.arange(step.n_ops), self.before, self.again)
        place = np.arange(step.n_ops) + np.searchsorted(
            np.array(self.before, np.int64), np.arange(step.n_ops), side="right"
        )
        again: Bools = np.ones(len(origin), bool)
        again[place] = False
        copy_of = np.concatenate((np.arange(step.n_tensors), np.array(self.copies, np.int64)))
        counts = np.diff(step.access_start)[origin]
        starts = np.concatenate(([0], np.cumsum(counts)))
        access = np.arange(starts[-1]) - np.repeat(starts[:-1] - step.access_start[origin], counts)
        tensor = self._renamed(step.access_tensor[access], starts, again, place)
        op = np.repeat(np.arange(len(origin)), counts)
        first, last = self._lives(place, again, op, tensor)
        made = StepTrace(
            op_us=step.op_us[origin],
            op_names=_picked(step.op_names, origin, labels),
            bytes=step.bytes[copy_of],
            large=step.large[copy_of],
            tags=_picked(step.tags, copy_of, labels),
            families=_picked(step.families, copy_of, labels),
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

    def _renamed(self, tensor: Ints, starts: Ints, again: Bools, place: Ints) -> Ints:
        """The accesses, of copies where an op accesses one."""
        changed, bounds = tensor.tolist(), starts.tolist()
        of_wanted = zip(place[list(self.wanted)].tolist(), self.wanted.values(), strict=True)
        of_again = zip(np.flatnonzero(again).tolist(), self.names, strict=True)
        for op, names in (*of_wanted, *of_again):
            begin, end = bounds[op], bounds[op + 1]
            changed[begin:end] = [names.get(t, t) for t in changed[begin:end]]
        return np.array(changed, np.int64)

    def _lives(self, place: Ints, again: Bools, op: Ints, tensor: Ints) -> tuple[Ints, Ints]:
        """First and last op of each tensor; `place`: where each op of the whole step is now."""
        step, graph = self.graph.step, self.graph
        count = step.n_tensors
        gone = self.dropped & graph.saved
        ends = np.where(gone, np.maximum(graph.last_forward, step.first), step.last)
        first = np.concatenate((place[step.first], np.full(len(self.copies), len(again))))
        last = np.concatenate((place[ends], np.full(len(self.copies), -1)))
        copy = tensor >= count
        np.minimum.at(first, tensor[copy], op[copy])
        later = copy | again[op]  # what an op run again reads lives as long
        np.maximum.at(last, tensor[later], op[later])
        return first, last


def dropped_by(graph: Graph, drop: Bools, keep: Bools) -> Bools:
    """[m] What a selection drops: what it can of `drop`, and the temporaries that is made from.

    An op's outputs go together: a plan says which ops to drop. Selections that drop the same make
    the same step.
    """
    kept: list[bool] = keep.tolist()
    dropped = [False] * len(kept)
    stack = np.flatnonzero(drop & graph.droppable).tolist()
    while stack:
        tensor = stack.pop()
        if dropped[tensor] or kept[tensor]:
            continue
        siblings = graph.siblings[tensor]
        if siblings and any(kept[t] or not graph.may_drop[t] for t in siblings):
            kept[tensor] = True
            continue
        dropped[tensor] = True
        stack += siblings
        stack += graph.temporaries[tensor]
    return np.array(dropped, bool)


def _picked(names: Sequence[str], index: Ints, labels: bool) -> tuple[str, ...]:
    return tuple(map(names.__getitem__, index.tolist())) if labels else ("",) * len(index)
