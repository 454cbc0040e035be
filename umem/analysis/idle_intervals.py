"""Idle intervals of a step, and the bytes in them at each op: the sums that all bounds use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..base.device_profiles import DeviceProfile
from ..trace.step_trace import Bools, Floats, Gaps, Ints, Kind, StepTrace

_BEGINS = 8  # the max number of ops at which bounds take a step to start


@dataclass(frozen=True, eq=False)
class IdleIntervals:
    """The gaps of a step whose contents must be kept, k of them, and their sums over the n ops.

    A gap of a tensor spans the ops strictly between two of its accesses: its bytes are needed
    later, and are either on the device or must be fetched again. A gap after the last access lasts
    until the tensor is freed, or the step ends. An engine must keep such a tensor, as it cannot
    know that it is not read again, but then none of it is fetched; nor is it if the next access
    overwrites it whole. Nothing else counts: not a tensor before its first access, nor a MADE
    tensor after the end of the step, nor a CARRIED one before its first access. So no sum exceeds
    the bytes of any run.

    Attributes:
        trace: the step.
        kept: the tensors whose gaps count even if no read ends them, [m]; None: all.
    """

    trace: StepTrace
    kept: Bools | None = None

    @cached_property
    def gaps(self) -> Gaps:
        """The gaps between accesses (`StepTrace.gaps`), and those after the last ones, [k].

        The `end` of the latter is the op after the one that they are freed in.
        """
        gaps, tails = self._between, self._tails
        return Gaps(
            np.concatenate((gaps.tensor, tails.tensor)),
            np.concatenate((gaps.start, tails.start)),
            np.concatenate((gaps.end, tails.end)),
            np.concatenate((gaps.idle_us, tails.idle_us)),
        )

    @cached_property
    def _between(self) -> Gaps:
        gaps = self.trace.gaps
        if self.kept is None:
            return gaps
        counts = self._reads(gaps) | self.kept[gaps.tensor]
        return Gaps(gaps.tensor[counts], gaps.start[counts], gaps.end[counts], gaps.idle_us[counts])

    def _reads(self, gaps: Gaps) -> Bools:
        """Return whether an access that reads ends each of these gaps between accesses."""
        trace = self.trace
        if trace.access_read is None:
            return np.ones(len(gaps.tensor), np.bool_)
        at = self._access_at(gaps.tensor, gaps.end % max(trace.n_ops, 1))
        reads: Bools = trace.access_read[trace.use_order[at]]
        return reads

    @cached_property
    def _tails(self) -> Gaps:
        trace = self.trace
        used = np.diff(trace.use_start) > 0
        last = np.full(trace.n_tensors, -1)
        last[used] = trace.access_op[trace.use_order[trace.use_start[1:][used] - 1]]
        written = np.zeros(trace.n_tensors, np.bool_)
        written[trace.access_tensor[trace.access_write]] = True
        held = used & (trace.kind != Kind.PERSISTENT) & (trace.last > last)
        held &= written | (trace.kind == Kind.CARRIED)  # else there are no contents
        tensor = np.flatnonzero(held if self.kept is None else held & self.kept)
        start, end = last[tensor], trace.last[tensor] + 1
        return Gaps(tensor, start, end, trace.begin_us[end] - trace.begin_us[start + 1])

    @cached_property
    def returns(self) -> Bools:
        """True if a read ends the gap, so that its contents are fetched again, [k]."""
        never = np.zeros(len(self._tails.tensor), np.bool_)
        return np.concatenate((self._reads(self._between), never))

    def _access_at(self, tensor: Ints, op: Ints) -> Ints:
        """Return the indices into `use_order` of accesses given by tensor and op."""
        trace, n = self.trace, self.trace.n_ops
        order = trace.use_order
        return np.searchsorted(
            trace.access_tensor[order] * n + trace.access_op[order], tensor * n + op
        )

    @cached_property
    def bytes(self) -> Ints:
        """The bytes of each gap's tensor, [k]."""
        return self.trace.bytes[self.gaps.tensor]

    @cached_property
    def held(self) -> Ints:
        """The bytes of the gaps that span each op, [n]."""
        here, wrapped = self._whole
        return here + wrapped

    @cached_property
    def _whole(self) -> tuple[Ints, Ints]:
        return self._sums(np.ones(len(self.bytes), np.bool_))

    @cached_property
    def need(self) -> Ints:
        """The bytes that an op accesses or that are kept for later, [n].

        Their excess over the capacity is swapped out.
        """
        return self.held + self.trace.working_set

    @cached_property
    def unread(self) -> Ints:
        """The spanning bytes that are never fetched again, [n]."""
        here, wrapped = self._sums(~self.returns)
        return here + wrapped

    @cached_property
    def version(self) -> Ints:
        """The write whose result the gap's tensor holds, [k], as an index into `use_order`.

        -1 if a copy on the host can be valid without any write-back of this step: for a tensor that
        the step does not write, and a CARRIED one that only the previous step wrote.
        """
        trace, gaps = self.trace, self.gaps
        tensor = trace.access_tensor[trace.use_order]
        place = np.arange(len(tensor))
        written = np.where(trace.access_write[trace.use_order], place, -1)
        latest = np.maximum.accumulate(written)
        latest[latest < trace.use_start[tensor]] = -1  # that was another tensor
        version = latest[self._access_at(gaps.tensor, gaps.start)]
        # Before its first write in a step, a persistent tensor holds the previous step's last one.
        last = latest[trace.use_start[gaps.tensor + 1] - 1]
        around = (version < 0) & (trace.kind[gaps.tensor] == Kind.PERSISTENT)
        return np.where(around, last, version)

    @cached_property
    def write_op(self) -> Ints:
        """The op of the write `version`, [k]: negative in the previous step, n_ops for none."""
        trace, gaps = self.trace, self.gaps
        if not len(gaps.start):
            return np.zeros(0, np.int64)
        op = trace.access_op[trace.use_order][self.version]
        op = np.where(op > gaps.start, op - trace.n_ops, op)
        return np.where(self.version < 0, trace.n_ops, op)

    @cached_property
    def clean(self) -> Ints:
        """The spanning bytes whose copy on the host can be valid without any write-back, [n]."""
        here, wrapped = self._sums(self.version < 0)
        return here + wrapped

    def out_since(self, begin: int) -> Ints:
        """Return the spanning bytes that need no write-back between op `begin` and each op, [n].

        They are clean, or were written before `begin` (its latest occurrence at or before the op)
        and may have left before it. In steady state a step can be taken to start at any op.
        """
        before, clean = self.write_op, self.version < 0
        here, wrapped = self._sums(clean | (before < begin))
        earlier = self._sums(clean | (before < begin - self.trace.n_ops))[0]
        at = np.arange(self.trace.n_ops)
        return np.where(at >= begin, here + self._whole[1], earlier + wrapped)

    def in_until(self, begin: int) -> Ints:
        """Return the spanning bytes not used before the next op `begin` after each op, [n]."""
        later, unread = self.gaps.end >= begin + self.trace.n_ops, ~self.returns
        here, wrapped = self._sums(later | unread)
        earlier = self._sums((self.gaps.end >= begin) | unread)[0] + wrapped
        at = np.arange(self.trace.n_ops)
        return np.where(at >= begin, here + self._sums(unread)[1], earlier)

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Ops to take the step to start at: op 0, and ops whose writes the next step needs.

        These are the writes whose results are idle across the end of the step, at quantiles of
        their bytes: at most `_BEGINS` ops in all.
        """
        n = self.trace.n_ops
        across = (self.version >= 0) & ((self.write_op < 0) | (self.gaps.end >= n)) & self.returns
        op, size = self.write_op[across] % max(n, 1), self.bytes[across]
        order = np.argsort(op, kind="stable")
        reached = np.cumsum(size[order])
        if not len(reached):
            return (0,)
        at = np.searchsorted(reached, reached[-1] * np.arange(_BEGINS - 1) / _BEGINS, side="right")
        return tuple(sorted({0, *op[order][at].tolist()}))

    def beside(self, begin: int) -> tuple[Floats, Floats]:
        """Return compute µs from op `begin` to each op, and after it until `begin`, [n] each."""
        trace, start = self.trace, self.trace.begin_us
        around = np.where(np.arange(trace.n_ops) < begin, trace.compute_us, 0.0)
        first = float(start[begin])
        return start[:-1] - first + around, trace.compute_us - start[1:] + first - around

    def transfers_us(self, over: Ints, device: DeviceProfile, begin: int) -> tuple[Floats, Floats]:
        """Return link µs for the bytes swapped out at each op, [n] each.

        The first is for writing them back since op `begin`, the second for reading them until
        `begin` comes again.

        Args:
            over: the bytes that are swapped out at each op, [n]. Bytes that left before, or are not
                used until then, take no time.
            device: the device, for its bandwidths.
            begin: the op that the step is taken to start at.
        """
        out = np.maximum(over - self.out_since(begin), 0) / device.bytes_per_us_out
        back = np.maximum(over - self.in_until(begin), 0) / device.bytes_per_us_in
        return out, back

    def _sums(self, which: Bools) -> tuple[Ints, Ints]:
        """Return sums of the chosen gaps over the ops of their step, and of the next, [n] each."""
        gaps, n = self.gaps, self.trace.n_ops
        amount = self.bytes[which]
        change = _count(gaps.start[which] + 1, amount, 2 * n + 1)
        change -= _count(gaps.end[which], amount, 2 * n + 1)
        total = np.cumsum(change)
        return total[:n], total[n : 2 * n]


def furthest_start(start: Ints, end: Ints, n: int) -> Ints:
    """Return the earliest start of the circular intervals that span each op, else op - 1, [n].

    Starts are in [0, n), each end at most n after its start. A value below 0 is in the previous
    period. No interval spans two ops in order if the first is at most the value of the second.
    """
    ends = np.full(2 * n, -n, np.int64)  # by start, beginning at -n
    np.maximum.at(ends, start + n, end)
    np.maximum.at(ends, start, end - n)
    reach = np.maximum.accumulate(ends)
    op = np.arange(n)
    return np.minimum(np.searchsorted(reach, op, side="right") - n, op - 1)


def _count(place: Ints, amount: Ints, length: int) -> Ints:
    # The weights are summed in float64, which is exact up to 2^53 bytes.
    return np.bincount(place, weights=amount, minlength=length).astype(np.int64)
