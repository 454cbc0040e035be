"""The dataflow graph of a step: dependencies of ops, and their depths."""

from __future__ import annotations

from ...trace.step_trace import StepTrace

REACH = 10  # levels beyond `ahead` that are searched for a trigger


class DataflowGraph:
    """Ops and, for each, the ops whose results it reads or overwrites.

    `level[op]` is one more than the highest level of those, and 0 if there are none.
    """

    def __init__(self, trace: StepTrace) -> None:
        self.needs: list[list[int]] = []
        self.level: list[int] = []
        writer: dict[int, int] = {}
        begin = trace.access_start.tolist()
        tensors, writes = trace.access_tensor.tolist(), trace.access_write.tolist()
        for op in range(trace.n_ops):
            span = range(begin[op], begin[op + 1])
            needs = sorted({writer[tensors[a]] for a in span if tensors[a] in writer})
            self.needs.append(needs)
            self.level.append(1 + max((self.level[one] for one in needs), default=-1))
            writer.update((tensors[a], op) for a in span if writes[a])
        self._ancestors: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def next_level(self, op: int) -> int:
        """Return the first later op that is deeper; a transfer is assumed to have ended by then."""
        following = range(op + 1, len(self.level))
        return next((one for one in following if self.level[one] > self.level[op]), len(self.level))

    def trigger(self, op: int, behind: int, ahead: int) -> int:
        """Return the op after which to fetch, for `op`, a tensor that leaves after op `behind`.

        It reaches `op`, is `ahead` levels above it or up to 10 more, the deepest first, and is
        deeper than op `behind`. If there is none, the fetch waits for the op just before.
        """
        if self.level[op] - ahead <= self.level[behind]:
            return op - 1  # all that `_reaching` would search is too shallow
        for level, one in self._reaching(op, ahead):
            if level > self.level[behind] and behind <= one < op:
                return one
        return op - 1

    def _reaching(self, op: int, ahead: int) -> list[tuple[int, int]]:
        """Return (level, op) of the ops in those levels that reach `op`, the deepest first."""
        key = (op, ahead)
        if key not in self._ancestors:
            top = self.level[op] - ahead
            seen, todo = {op}, [op]
            while todo:
                for one in self.needs[todo.pop()]:
                    if one not in seen and self.level[one] >= top - REACH:
                        seen.add(one)
                        todo.append(one)
            seen.discard(op)
            found = [(self.level[one], one) for one in seen if self.level[one] <= top]
            self._ancestors[key] = sorted(found, reverse=True)
        return self._ancestors[key]
