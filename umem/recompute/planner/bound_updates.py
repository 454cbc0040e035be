"""Terms of the bound's linear program for updates on the host: each one's savings in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...analysis.idle_intervals import IdleIntervals
from ...base.device_profiles import DeviceProfile
from ...trace.step_trace import Bools, Floats, Ints, Kind
from .host_updates import Update, host_us, uses_beside


@dataclass(frozen=True, eq=False)
class UpdateTerms:
    """Changes of a step by u updates that the host does, at k instants. Bytes and µs.

    A term that is not known exactly is overestimated, so that the bound remains valid.
    """

    spans: IdleIntervals
    device: DeviceProfile
    updates: tuple[Update, ...]

    @cached_property
    def host_us(self) -> Floats:
        """The time on the host's lane, [u]."""
        step = self.spans.trace
        return np.array([sum(host_us(step, update, self.device)) for update in self.updates])

    @cached_property
    def device_us(self) -> Floats:
        """The time of their ops on the device, [u]."""
        return np.array([self._us(update).sum() for update in self.updates])

    def _us(self, update: Update) -> Floats:
        us: Floats = self.spans.trace.op_us[list(update.ops)] * np.array(update.parts)
        return us

    @cached_property
    def bytes(self) -> Ints:
        """Bytes of gradients, which leave, and of parameters, which return, [u]."""
        size = self.spans.trace.bytes
        return np.array([sum(int(size[p]) for p, _ in u.pairs) for u in self.updates], np.int64)

    def needed(self, instants: Ints) -> Ints:
        """Return the most bytes by which each op's need falls, [u, k].

        States are absent throughout, gradients after the op that completes them, and parameters
        from their last use to the first one in the next step.
        """
        step = self.spans.trace
        found = np.zeros((len(self.updates), len(instants)), np.int64)
        for row, update in zip(found, self.updates, strict=True):
            persistent = [t for t in update.inside if step.kind[t] == Kind.PERSISTENT]
            row += int(step.bytes[persistent].sum())
            for tensor in set(update.inside) - set(persistent):
                alive = (instants >= step.first[tensor]) & (instants <= step.last[tensor])
                row += int(step.bytes[tensor]) * alive
            for parameter, gradient in update.pairs:
                others = uses_beside(step, parameter, update.ops)
                made = uses_beside(step, gradient, update.ops)
                row += int(step.bytes[gradient]) * (instants > made[-1])
                away = (instants < others[0]) | (instants > others[-1])
                row += int(step.bytes[parameter]) * away
            for carrier in update.carriers:
                row += int(step.bytes[carrier]) * (instants <= step.last[carrier])
        return found

    def times_beside(self, begin: int, instants: Ints) -> tuple[Floats, Floats]:
        """Return the µs of their ops from op `begin` to each instant, and after it, [u, k] each."""
        step = self.spans.trace
        before, after = (np.zeros((len(self.updates), len(instants))) for _ in range(2))
        at = (instants - begin) % step.n_ops
        for u, update in enumerate(self.updates):
            ops = (np.array(update.ops) - begin) % step.n_ops
            order = np.argsort(ops)
            sums = np.concatenate(([0.0], np.cumsum(self._us(update)[order])))
            before[u] = sums[np.searchsorted(ops[order], at, side="left")]
            after[u] = sums[-1] - sums[np.searchsorted(ops[order], at, side="right")]
        return before, after

    def idle_parameters(self, instants: Ints) -> Ints:
        """Return the most bytes of parameters between their first and last use, [u, k].

        No op of the step writes them, so they need no write-back.
        """
        return self._idle([parameter for u in self.updates for parameter, _ in u.pairs], instants)

    def idle_gradients(self, instants: Ints) -> Ints:
        """Return the bytes of gradients between their completion and their last use, [u, k].

        One that leaves there, and is only read afterwards, needs no other write-back.
        """
        return self._idle([gradient for u in self.updates for _, gradient in u.pairs], instants)

    def _idle(self, tensors: Sequence[int], instants: Ints) -> Ints:
        """Return the bytes of one tensor of each update, between its uses by other ops, [u, k]."""
        step = self.spans.trace
        found = np.zeros((len(self.updates), len(instants)), np.int64)
        for row, update, tensor in zip(found, self.updates, tensors, strict=True):
            others = uses_beside(step, tensor, update.ops)
            inside = (instants > others[0]) & (instants < others[-1])
            row += int(step.bytes[tensor]) * inside
        return found

    def written_before(self, begin: int, instants: Ints) -> Ints:
        """Return the bytes of their states in `IdleIntervals.out_since(begin)`, [u, k]."""
        written, n = self.spans.write_op[:, None], self.spans.trace.n_ops
        clean, inside = self.spans.version[:, None] < 0, instants >= begin
        here = clean | (written < np.where(inside, begin, begin - n))
        wrapped = clean | inside | (written < begin)
        return self._of_states(here, wrapped, instants)

    def used_after(self, begin: int, instants: Ints) -> Ints:
        """Return the bytes of their states in `IdleIntervals.in_until(begin)`, [u, k]."""
        end, n = self.spans.gaps.end[:, None], self.spans.trace.n_ops
        unread, inside = ~self.spans.returns[:, None], instants >= begin
        here = unread | (end >= np.where(inside, begin + n, begin))
        wrapped = unread | (~inside & (end >= begin + n))
        return self._of_states(here, wrapped, instants)

    def _of_states(self, here: Bools, wrapped: Bools, instants: Ints) -> Ints:
        """Sum the bytes of the gaps of states that span each instant, and count there, [u, k].

        Args:
            here: whether a gap counts at an instant in its own step, [gaps, k].
            wrapped: the same in the next step.
            instants: ops, [k].
        """
        gaps, step = self.spans.gaps, self.spans.trace
        owner = np.full(step.n_tensors, -1)
        for row, update in enumerate(self.updates):
            owner[[t for t in update.inside if step.kind[t] == Kind.PERSISTENT]] = row
        mine = np.flatnonzero(owner[gaps.tensor] >= 0)
        start, end = gaps.start[mine, None], gaps.end[mine, None]
        later = instants + step.n_ops
        counts = (start < instants) & (instants < end) & here[mine]
        counts |= (start < later) & (later < end) & wrapped[mine]
        found = np.zeros((len(self.updates), len(instants)), np.int64)
        np.add.at(found, owner[gaps.tensor[mine]], counts * self.spans.bytes[mine][:, None])
        return found
