"""Which gaps are spent away: greedily by a priority, then none that is not needed."""

from __future__ import annotations

import numpy as np

from ..trace.step import Floats, Gaps, Ints, StepTrace

NOTHING = -(1 << 62)
most = np.maximum.reduce  # `max` without its Python wrapper


def choose(trace: StepTrace, gaps: Gaps, excess: Ints, priority: Floats) -> Ints:
    """The gaps to be away in: after them no op is over, as far as gaps can help.

    Args:
        trace: the step.
        gaps: of large tensors.
        excess: [n_ops] bytes over the capacity when nothing leaves; below 0 there is room.
        priority: of each gap, the highest goes first; but before all, those that are not larger
            than what some op inside is over.

    Returns:
        Indices into `gaps`, ascending by `start`.
    """
    hot = np.flatnonzero(excess > 0)  # leaving helps these ops only, and staying hurts no other
    spans = _Spans(trace, gaps, excess[hot], hot)
    useful = np.flatnonzero(spans.useful)
    order = useful[
        np.lexsort((gaps.start[useful], gaps.tensor[useful], -priority[useful]))
    ].tolist()
    left = [gap for gap in order if spans.leave(gap, whole=True)]
    taken = set(left)
    left += [gap for gap in order if gap not in taken and spans.leave(gap)]
    shortest_first = sorted(left, key=lambda gap: (gaps.idle_us[gap], -gap))
    away = [gap for gap in shortest_first if not spans.keep(gap)]
    index = np.array(away, np.int64)
    return index[np.lexsort((gaps.tensor[index], gaps.start[index]))]


class _Spans:
    """The bytes over the capacity in the hot ops, and gaps as slices of them."""

    def __init__(self, trace: StepTrace, gaps: Gaps, over: Ints, hot: Ints) -> None:
        n = trace.n_ops
        begin = np.searchsorted(hot, gaps.start + 1)
        end = np.searchsorted(hot, np.minimum(gaps.end, n))
        wrap = np.searchsorted(hot, gaps.end - n)
        self.useful = (end > begin) | (wrap > 0)
        self._over = over
        self._begin, self._end, self._wrap = begin.tolist(), end.tolist(), wrap.tolist()
        self._amount = trace.bytes[gaps.tensor].tolist()

    def leave(self, gap: int, *, whole: bool = False) -> bool:
        """Be away in this gap if an op inside is over the capacity (`whole`: by all its bytes)."""
        amount = self._amount[gap]
        if self._most(gap) < (amount if whole else 1):
            return False
        self._add(gap, -amount)
        return True

    def keep(self, gap: int) -> bool:
        """Stay in this gap, once left, if all ops inside have room for it."""
        amount = self._amount[gap]
        if self._most(gap) > -amount:
            return False
        self._add(gap, amount)
        return True

    # Most gaps have one part only, and there are thousands: an empty part costs no call of numpy.
    def _most(self, gap: int) -> int:
        begin, end, wrap = self._begin[gap], self._end[gap], self._wrap[gap]
        inside = int(most(self._over[begin:end])) if begin < end else NOTHING
        return max(inside, int(most(self._over[:wrap]))) if wrap > 0 else inside

    def _add(self, gap: int, amount: int) -> None:
        begin, end, wrap = self._begin[gap], self._end[gap], self._wrap[gap]
        if begin < end:
            self._over[begin:end] += amount
        if wrap > 0:
            self._over[:wrap] += amount
