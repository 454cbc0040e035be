"""Rewritten steps: some results of the forward pass are dropped, and rebuilt in backward."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...trace.step_trace import Bools, Ints, StepTrace
from .candidates import Selection
from .graph import RecomputeGraph


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A step that runs some forward ops a second time.

    Tensors 0 to m-1 are those of the original step, in its order; rebuilt copies follow.
    """

    graph: RecomputeGraph
    selection: Selection  # as requested
    dropped: Bools  # [m] not kept for backward: saved tensors, and temporaries they are made from
    freed: Bools  # [m] dropped, and the copies are freed after each use
    origin: Ints  # [n'] each op's original op
    again: Bools  # [n'] whether the op is run again
    copy_of: Ints  # [m'] each tensor's original tensor
    step: StepTrace

    @property
    def recompute_us(self) -> float:
        """The time in µs of all recomputed ops."""
        return float(self.step.op_us[self.again].sum())

    @property
    def behind_backward(self) -> int:
        """The first op after all uses of the forward pass, the optimizer's; 0 if there is none."""
        op = int(np.searchsorted(self.origin[~self.again], self.graph.last_wanted, side="right"))
        behind = np.flatnonzero(~self.again)[op:]
        return int(behind[0]) if len(behind) else 0

    @cached_property
    def drop_ops(self) -> tuple[int, ...]:
        """The forward ops with dropped results, ascending."""
        return tuple(sorted(self.graph.ops_of(np.flatnonzero(self.dropped).tolist())))

    @cached_property
    def free_ops(self) -> tuple[int, ...]:
        """The forward ops whose rebuilt results are freed after each use, ascending."""
        return tuple(sorted(self.graph.ops_of(np.flatnonzero(self.freed).tolist())))


def rewrite(
    graph: RecomputeGraph, drop: Bools, keep: Bools, free: Bools, *, labels: bool = True
) -> Rewritten:
    """Drop tensors, and rebuild them before the first op in backward that reads them.

    An input of an op that runs again is, in order of preference: a kept tensor, whose lifetime is
    extended; a copy that exists already; rebuilt itself, back to kept tensors. Ops run again in the
    order of the forward pass, including those that change a tensor in place, which change the copy.

    Args:
        graph: the graph of the original step.
        drop: saved tensors that are not kept, [m]; those that are not `droppable` are kept.
        keep: tensors that backward does not read and that are kept for rebuilding others, [m].
        free: tensors whose copies are freed, and rebuilt for each op that needs them, [m]. The
            copies that such an op needs, directly or as sources, live until it ends. Copies of
            other tensors live as long as they are needed.
        labels: whether ops and tensors of the new step get names; a search needs none.
    """
    rewriter = _Rewriter(graph, Selection(drop, keep, free))
    rewriter.run()
    return rewriter.build(labels)


class _Rewriter:
    """The state of one rewrite. Values are numbered as in the graph."""

    def __init__(self, graph: RecomputeGraph, selection: Selection) -> None:
        self.graph, self.count = graph, graph.step.n_tensors
        self.selection = selection
        self.dropped = dropped_by(graph, selection.drop, selection.keep)
        self.freed = freed_by(graph, self.dropped, selection.free)
        self.gone: list[bool] = self.dropped.tolist()
        self.passing: list[bool] = self.freed.tolist()
        self.before: list[int] = []  # for each op run again: the op that it precedes
        self.again: list[int] = []
        self.copies: list[int] = []  # the original tensor of each copy
        self.here: dict[int, int] = {}  # the latest copy of each tensor
        self.holds: dict[int, int] = {}  # the value that this copy holds
        self.to_free: list[int] = []  # the tensors of `here` that are freed after use
        # The copies that ops access: recomputed ops, by index into `again`, and other ops.
        self.names: list[dict[int, int]] = []
        self.wanted: dict[int, dict[int, int]] = {}

    def run(self) -> None:
        graph, gone, here, holds = self.graph, self.gone, self.here, self.holds
        final = graph.final
        for op, wanted in graph.wanted_at:
            missing = [tensor for tensor in wanted if gone[tensor]]
            if not missing:
                continue
            names = self.wanted[op] = {}
            # One after the other, as autograd requests them. Most ops' copies exist already.
            for tensor in missing:
                if holds.get(tensor) != final[tensor]:
                    for again in self._needed(final[tensor]):
                        self.before.append(op)
                        self._run_again(again)
                names[tensor] = here[tensor]
                self._free(names)
            self._free(())

    def _free(self, used: Container[int]) -> None:
        """Forget the copies to free, except those of `used`."""
        left = []
        for tensor in self.to_free:
            if tensor in used:
                left.append(tensor)
            elif self.here.pop(tensor, None) is not None:
                self.holds.pop(tensor, None)
        self.to_free = left

    def _needed(self, value: int) -> list[int]:
        """Return the forward ops to run again for a value, in order.

        A copy that was changed in place after the needed version is rebuilt.
        """
        graph, gone, holds = self.graph, self.gone, self.holds
        tensor_of, final, writer = graph.tensor_of, graph.final, graph.writer
        stack, seen, ops = [value], {value}, set()
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
                if self.passing[tensor]:
                    self.to_free.append(tensor)
            holds[tensor] = value
            names[tensor] = here[tensor]
        self.names.append(names)
        self.again.append(op)

    def build(self, labels: bool) -> Rewritten:
        """Build the columns of the new step."""
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
            next_alias=np.concatenate((step.next_alias, np.full(len(self.copies), -1))),
            source=step.source[copy_of],
            access_start=starts,
            access_tensor=tensor,
            access_write=step.access_write[access],
            access_read=None if step.access_read is None else step.access_read[access],
            updates=step.updates,
            access_part=None if step.access_part is None else step.access_part[access],
            parts=step.parts,
            cut=None if step.cut is None else step.cut[copy_of],
        )
        return Rewritten(
            self.graph, self.selection, self.dropped, self.freed, origin, again, copy_of, made
        )

    def _renamed(self, tensor: Ints, starts: Ints, again: Bools, place: Ints) -> Ints:
        """Return the accessed tensors, with copies in place of originals where ops use them."""
        changed, bounds = tensor.tolist(), starts.tolist()
        of_wanted = zip(place[list(self.wanted)].tolist(), self.wanted.values(), strict=True)
        of_again = zip(np.flatnonzero(again).tolist(), self.names, strict=True)
        for op, names in (*of_wanted, *of_again):
            begin, end = bounds[op], bounds[op + 1]
            changed[begin:end] = [names.get(t, t) for t in changed[begin:end]]
        return np.array(changed, np.int64)

    def _lives(self, place: Ints, again: Bools, op: Ints, tensor: Ints) -> tuple[Ints, Ints]:
        """Return the first and last op of each tensor; `place`: new indices of original ops."""
        step, graph = self.graph.step, self.graph
        count = step.n_tensors
        gone = self.dropped & graph.saved
        ends = np.where(gone, np.maximum(graph.last_forward, step.first), step.last)
        first = np.concatenate((place[step.first], np.full(len(self.copies), len(again))))
        last = np.concatenate((place[ends], np.full(len(self.copies), -1)))
        copy = tensor >= count
        np.minimum.at(first, tensor[copy], op[copy])
        later = copy | again[op]  # an op that runs again extends the lifetime of its inputs
        np.maximum.at(last, tensor[later], self._until(place, again, op, tensor)[later])
        return first, last

    def _until(self, place: Ints, again: Bools, op: Ints, tensor: Ints) -> Ints:
        """Return the op up to which each access keeps its tensor.

        A tensor freed after use can be rebuilt while autograd refers to it, up to the end of the op
        that uses it: its sources live until then.
        """
        if not self.freed.any():
            return op
        ends = np.arange(len(again))
        ends[again] = np.where(self._is_freed(), place[self.before], ends[again])
        copied = np.concatenate((np.arange(self.count), np.array(self.copies, np.int64)))
        return np.where(self.freed[copied[tensor]], op, ends[op])

    def _is_freed(self) -> Bools:
        """Return whether each recomputed op makes tensors that are freed after use."""
        freed: Bools = np.zeros(self.graph.step.n_ops, bool)
        freed[list(self.graph.ops_of(np.flatnonzero(self.freed).tolist()))] = True
        return np.asarray(freed[self.again], bool)


def dropped_by(graph: RecomputeGraph, drop: Bools, keep: Bools) -> Bools:
    """Return the dropped tensors, [m]: `drop` where possible, and the temporaries they need.

    All outputs of an op are dropped together, because a plan lists ops. Selections that drop the
    same tensors result in the same step.
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


def freed_by(graph: RecomputeGraph, dropped: Bools, free: Bools) -> Bools:
    """Return the tensors whose copies are freed after use, [m]: `free` where they are dropped.

    Outputs of an op are freed together, because a plan lists ops: only if all of them are.
    """
    freed: list[bool] = (free & dropped).tolist()
    stack = np.flatnonzero(dropped & ~free).tolist()
    while stack:
        for other in graph.siblings[stack.pop()]:
            if freed[other]:
                freed[other] = False
                stack.append(other)
    return np.array(freed, bool)


def _picked(names: Sequence[str], index: Ints, labels: bool) -> tuple[str, ...]:
    return tuple(map(names.__getitem__, index.tolist())) if labels else ("",) * len(index)
