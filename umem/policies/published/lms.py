"""Baseline `lms`: write out early what the last iteration had to evict."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from ...base.device_profiles import DeviceProfile
from ...trace.step_trace import Kind, StepTrace
from ..base import Move, Plan
from ..default.occupancy import capacity


class Lms:
    """On demand with a queue of inactive blocks, and early eviction by the last iteration.

    A block leaves the queue while an op uses it and is appended when the op ends, so the queue is
    in the order of last use. Under pressure the first block in it that is large enough is evicted,
    or else as many as needed. A block that was evicted after some use in the last iteration is
    paged out at that use in the next: the last iteration is derived by running the queue over the
    trace. The original matches a block's history by its prefix; in a step that repeats, that always
    matches.

    Source: IBM, "PyTorch Large Model Support", 2020 (patch for PyTorch 1.5).
    """

    name = "lms"

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:  # noqa: ARG002
        """Return early evictions; nothing is fetched before an op asks for it."""
        queue = _Queue(trace, capacity(trace, budget))
        queue.step()
        return Plan(trace, evict=tuple(sorted(queue.step())))


class _Queue:
    """The simulated queue: resident large tensors, and the inactive ones among them."""

    def __init__(self, trace: StepTrace, room: int) -> None:
        self._trace = trace
        self._room = room
        self._bytes = trace.bytes.tolist()
        # tensor: the op that used it last; None before its first use
        self._inactive: OrderedDict[int, int | None] = OrderedDict()
        self._resident: dict[int, int] = {}  # tensor: its bytes
        self._used = 0
        large = np.flatnonzero(trace.large)
        self._born: list[list[int]] = [[] for _ in range(trace.n_ops)]
        self._dying: list[list[int]] = [[] for _ in range(trace.n_ops)]
        for tensor in large[trace.kind[large] != Kind.PERSISTENT].tolist():
            self._born[int(trace.first[tensor])].append(tensor)
            self._dying[int(trace.last[tensor])].append(tensor)

    def step(self) -> list[Move]:
        """Run one more iteration; return its evictions, each at the tensor's last use before."""
        trace, moves = self._trace, list[Move]()
        for op in range(trace.n_ops):
            begin, end = trace.access_start[op], trace.access_start[op + 1]
            touched = trace.access_tensor[begin:end]
            active = dict.fromkeys(touched[trace.large[touched]].tolist())
            for tensor in active:
                self._inactive.pop(tensor, None)
            for tensor in (*active, *self._born[op]):
                if tensor not in self._resident:
                    moves += self._reclaim(self._bytes[tensor])
                    self._enter(tensor)
            self._inactive.update((tensor, None) for tensor in self._born[op])
            for tensor in active:
                self._inactive[tensor] = op
                self._inactive.move_to_end(tensor)
            for tensor in self._dying[op]:
                self._inactive.pop(tensor, None)
                self._leave(tensor)
        return moves

    def _reclaim(self, need: int) -> list[Move]:
        moves: list[Move] = []
        while self._inactive and self._used + need > self._room:
            short = self._used + need - self._room
            fitting = (tensor for tensor in self._inactive if self._bytes[tensor] >= short)
            victim = next(fitting, next(iter(self._inactive)))
            after = self._inactive.pop(victim)
            if after is not None:
                moves.append(Move(after, victim))
            self._leave(victim)
        return moves

    def _enter(self, tensor: int) -> None:
        self._resident[tensor] = self._bytes[tensor]
        self._used += self._bytes[tensor]

    def _leave(self, tensor: int) -> None:
        self._used -= self._resident.pop(tensor, 0)
