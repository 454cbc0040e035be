"""What the idle intervals of a step hold at each op: the sums that every bound starts from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..devices import DeviceProfile
from ..trace.step import Bools, Floats, Ints, Kind, StepTrace

_BEGINS = 8  # at which bounds take a step to begin


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
        here, wrapped = self._whole
        return here + wrapped

    @cached_property
    def _whole(self) -> tuple[Ints, Ints]:
        return self._sums(np.ones(len(self.bytes), np.bool_))

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

    def tails(self, which: Bools, written_from: int = 0) -> Ints:
        """[n] Bytes behind their last access of tensors made in the step, and not freed yet.

        What a program holds an engine has to hold, as nothing says that it is not read again. No
        other sum counts them.

        Args:
            which: [m] the tensors to count.
            written_from: count those that were last written at this op or later.
        """
        trace, n = self.trace, self.trace.n_ops
        until, written = np.full((2, trace.n_tensors), -1)
        np.maximum.at(until, trace.access_tensor, trace.access_op)
        write = trace.access_write
        np.maximum.at(written, trace.access_tensor[write], trace.access_op[write])
        made = (trace.kind == Kind.TRANSIENT) & trace.large
        tensor = np.flatnonzero(which & made & (trace.last > until) & (written >= written_from))
        size = trace.bytes[tensor]
        change = _count(until[tensor] + 1, size, n + 1)
        change -= _count(trace.last[tensor] + 1, size, n + 1)
        return np.cumsum(change)[:n]

    def out_since(self, begin: int) -> Ints:
        """[n] Spanning bytes that no write-back between op `begin` and the op has to serve.

        They are clean, or were written before `begin`, the latest one at or before the op, and may
        have left before it. In steady state a step can be taken to begin at any op.
        """
        before, clean = self.write_op, self.version < 0
        here, wrapped = self._sums(clean | (before < begin))
        earlier = self._sums(clean | (before < begin - self.trace.n_ops))[0]
        at = np.arange(self.trace.n_ops)
        return np.where(at >= begin, here + self._whole[1], earlier + wrapped)

    def in_until(self, begin: int) -> Ints:
        """[n] Spanning bytes that are used next at the first op `begin` after the op, or later."""
        here, wrapped = self._sums(self.trace.gaps.end >= begin + self.trace.n_ops)
        at = np.arange(self.trace.n_ops)
        return np.where(at >= begin, here, self._sums(self.trace.gaps.end >= begin)[0] + wrapped)

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Where to take the step to begin: op 0, and before writes that the next step needs.

        These are the writes whose results are idle across the end of the step, by quantiles of
        their bytes: `_BEGINS` in all at most.
        """
        n = self.trace.n_ops
        across = (self.version >= 0) & ((self.write_op < 0) | (self.trace.gaps.end >= n))
        op, size = self.write_op[across] % max(n, 1), self.bytes[across]
        order = np.argsort(op, kind="stable")
        reached = np.cumsum(size[order])
        if not len(reached):
            return (0,)
        at = np.searchsorted(reached, reached[-1] * np.arange(_BEGINS - 1) / _BEGINS, side="right")
        return tuple(sorted({0, *op[order][at].tolist()}))

    def beside(self, begin: int) -> tuple[Floats, Floats]:
        """[n] twice: compute µs between op `begin` and each op, and behind it until `begin`."""
        trace, start = self.trace, self.trace.begin_us
        around = np.where(np.arange(trace.n_ops) < begin, trace.compute_us, 0.0)
        first = float(start[begin])
        return start[:-1] - first + around, trace.compute_us - start[1:] + first - around

    def transfers_us(self, over: Ints, device: DeviceProfile, begin: int) -> tuple[Floats, Floats]:
        """[n] twice: µs of link that what is away at each op takes since `begin`, and until then.

        `over`: [n] bytes that are away. What left before, or is not used until then, takes none.
        """
        out = np.maximum(over - self.out_since(begin), 0) / device.bytes_per_us_out
        back = np.maximum(over - self.in_until(begin), 0) / device.bytes_per_us_in
        return out, back

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
