"""What the idle intervals of a step hold at each op: the sums that every bound starts from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..trace.step import Bools, Ints, Kind, StepTrace


@dataclass(frozen=True, eq=False)
class Spans:
    """The gaps of a step (`StepTrace.gaps`), k of them, and their sums over the n ops they span.

    A gap of a tensor spans the ops strictly between its two accesses: there its bytes are needed
    later, and are either on the device or have to come in again. Nothing else counts as a need:
    not a tensor before its first or after its last access, nor a MADE tensor beyond the end of the
    step and a CARRIED one before its first access. So all sums are at most what any run holds.
    """

    trace: StepTrace

    @cached_property
    def bytes(self) -> Ints:
        """[k] Bytes of each gap's tensor."""
        return self.trace.bytes[self.trace.gaps.tensor]

    @cached_property
    def held(self) -> Ints:
        """[n] Bytes of the gaps that span each op."""
        here, wrapped = self._sums(np.ones(len(self.bytes), np.bool_))
        return here + wrapped

    @cached_property
    def need(self) -> Ints:
        """[n] Bytes that an op accesses or that are needed later: what exceeds capacity is away."""
        return self.held + self.trace.working_set

    @cached_property
    def version(self) -> Ints:
        """[k] The write whose result the gap's tensor holds, as its place in `use_order`.

        -1 where a copy on the host can be valid without any write-back of this step: a tensor that
        the step does not write, and a CARRIED one that was written in the step before only.
        """
        trace, gaps, n = self.trace, self.trace.gaps, self.trace.n_ops
        tensor = trace.access_tensor[trace.use_order]
        place = np.arange(len(tensor))
        written = np.where(trace.access_write[trace.use_order], place, -1)
        latest = np.maximum.accumulate(written)
        latest[latest < trace.use_start[tensor]] = -1  # of an other tensor
        at = np.searchsorted(
            tensor * n + trace.access_op[trace.use_order], gaps.tensor * n + gaps.start
        )
        version = latest[at]
        # Before the step's first write a persistent tensor holds the last one of the step before.
        last = latest[trace.use_start[gaps.tensor + 1] - 1]
        around = (version < 0) & (trace.kind[gaps.tensor] == Kind.PERSISTENT)
        return np.where(around, last, version)

    @cached_property
    def write_op(self) -> Ints:
        """[k] The op of that write, negative for one of the step before; n_ops where it is -1."""
        trace, gaps = self.trace, self.trace.gaps
        if not len(gaps.start):
            return np.zeros(0, np.int64)
        op = trace.access_op[trace.use_order][self.version]
        op = np.where(op > gaps.start, op - trace.n_ops, op)
        return np.where(self.version < 0, trace.n_ops, op)

    @cached_property
    def clean(self) -> Ints:
        """[n] Spanning bytes whose copy on the host can be valid without a write-back, ever."""
        here, wrapped = self._sums(self.version < 0)
        return here + wrapped

    @cached_property
    def out_before(self) -> Ints:
        """[n] Spanning bytes that no write-back between the step's begin and the op has to serve.

        They are clean, or were written before the step began and may have left then.
        """
        away = (self.version < 0) | (self.write_op < 0)
        return self._sums(away)[0] + self._sums(np.ones(len(away), np.bool_))[1]

    @cached_property
    def in_later(self) -> Ints:
        """[n] Spanning bytes that are next used in the next step: they may come in later."""
        return self._sums(self.trace.gaps.end >= self.trace.n_ops)[0]

    def _sums(self, which: Bools) -> tuple[Ints, Ints]:
        """[n] twice: of the chosen gaps over ops of the step they start in, and of the next one."""
        gaps, n = self.trace.gaps, self.trace.n_ops
        amount = self.bytes[which]
        change = _count(gaps.start[which] + 1, amount, 2 * n + 1)
        change -= _count(gaps.end[which], amount, 2 * n + 1)
        total = np.cumsum(change)
        return total[:n], total[n : 2 * n]


def furthest_start(start: Ints, end: Ints, n: int) -> Ints:
    """[n] For each op the earliest start of the circular intervals that span it, else op - 1.

    The starts are in [0, n), the ends at most n beyond. A value below 0 is in the period before.
    Of two ops in order, no interval spans both if the first is at most the value of the second.
    """
    ends = np.full(2 * n, -n, np.int64)  # by start, from -n on
    np.maximum.at(ends, start + n, end)
    np.maximum.at(ends, start, end - n)
    reach = np.maximum.accumulate(ends)
    op = np.arange(n)
    return np.minimum(np.searchsorted(reach, op, side="right") - n, op - 1)


def _count(place: Ints, amount: Ints, length: int) -> Ints:
    # The weights are summed in float64, which is exact up to 2^53 bytes.
    return np.bincount(place, weights=amount, minlength=length).astype(np.int64)
