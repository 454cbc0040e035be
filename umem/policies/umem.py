"""`umem`, the default: the longest idle tensors leave early and return by deadline."""

from __future__ import annotations

import numpy as np

from ..devices import DeviceProfile
from ..trace.step import Gaps, Ints, StepTrace
from .base import Fetch, Move, Plan
from .occupancy import bytes_over, capacity, large_live_bytes, movable_gaps, select


class Umem:
    """Greedy choice of the idle intervals that tensors spend away, longest time first.

    Every gap between two uses of a large tensor is a chance to be away. In the order of idle time,
    a gap is left where any op inside is over the capacity; then gaps that turn out not to be needed
    are kept after all, shortest first, which brings the bytes moved near to their lower bound.
    A chosen tensor leaves as soon as its last use has ended, and returns in the order of deadlines
    once the planned occupancy has room for it until its next use.

    Source: the interval view of Belady's rule (Belady 1966; Berger, Beckmann and Harchol-Balter,
    "Practical bounds on optimal caching with variable object sizes", SIGMETRICS 2018), with early
    eviction and gated prefetch.
    """

    name = "umem"

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan:  # noqa: ARG002
        """A gated plan; without moves where the step fits."""
        room = capacity(trace, budget)
        occupancy = large_live_bytes(trace)
        gaps = movable_gaps(trace)
        chosen = select(gaps, choose(trace, gaps, occupancy - room))
        occupancy = occupancy - bytes_over(chosen, trace.bytes[chosen.tensor], trace.n_ops)
        left = np.unique(chosen.tensor)
        return Plan(
            trace,
            evict=_evictions(chosen),
            fetch=_fetches(chosen),
            read_mostly=tuple(left[trace.clean[left]].tolist()),
            gated=True,
            occupancy=np.minimum(occupancy, room),
            capacity=room,
            order="furthest",
        )


def choose(trace: StepTrace, gaps: Gaps, excess: Ints) -> Ints:
    """The gaps to be away in: after them no op is over, as far as gaps can help.

    Args:
        trace: the step.
        gaps: of large tensors.
        excess: [n_ops] bytes over the capacity when nothing leaves; below 0 there is room.

    Returns:
        Indices into `gaps`, ascending by `start`.
    """
    hot = np.flatnonzero(excess > 0)  # leaving helps these ops only, and staying hurts no other
    begin, end, wrap = _spans(gaps, hot, len(excess))
    useful = np.flatnonzero((end > begin) | (wrap > 0))
    amount = trace.bytes[gaps.tensor]
    by_time = useful[np.lexsort((gaps.tensor[useful], -gaps.idle_us[useful]))]
    over = excess[hot]
    spans = _Spans(over, begin.tolist(), end.tolist(), wrap.tolist(), amount.tolist())
    left = [gap for gap in by_time.tolist() if spans.leave(gap)]
    away = [gap for gap in reversed(left) if not spans.keep(gap)]
    index = np.array(away, np.int64)
    return index[np.lexsort((gaps.tensor[index], gaps.start[index]))]


class _Spans:
    """The bytes over the capacity in the hot ops, and gaps as slices of them."""

    def __init__(
        self, over: Ints, begin: list[int], end: list[int], wrap: list[int], amount: list[int]
    ) -> None:
        self._over = over
        self._begin, self._end, self._wrap, self._amount = begin, end, wrap, amount

    def leave(self, gap: int) -> bool:
        """Be away in this gap if an op inside is over the capacity."""
        inside = self._over[self._begin[gap] : self._end[gap]]
        around = self._over[: self._wrap[gap]]
        if inside.max(initial=0) <= 0 and around.max(initial=0) <= 0:
            return False
        inside -= self._amount[gap]
        around -= self._amount[gap]
        return True

    def keep(self, gap: int) -> bool:
        """Stay in this gap, once left, if all ops inside have room for it."""
        room = -self._amount[gap]
        inside = self._over[self._begin[gap] : self._end[gap]]
        around = self._over[: self._wrap[gap]]
        if inside.max(initial=room) > room or around.max(initial=room) > room:
            return False
        inside -= room
        around -= room
        return True


def _spans(gaps: Gaps, hot: Ints, n_ops: int) -> tuple[Ints, Ints, Ints]:
    begin = np.searchsorted(hot, gaps.start + 1)
    end = np.searchsorted(hot, np.minimum(gaps.end, n_ops))
    return begin, end, np.searchsorted(hot, gaps.end - n_ops)


def _evictions(gaps: Gaps) -> tuple[Move, ...]:
    return tuple(map(Move, gaps.start.tolist(), gaps.tensor.tolist()))


def _fetches(gaps: Gaps) -> tuple[Fetch, ...]:
    """By deadline; a tensor that no op uses is not fetched."""
    index = np.flatnonzero(gaps.start >= 0)
    index = index[np.argsort(gaps.end[index], kind="stable")]
    chosen = select(gaps, index)
    columns = (chosen.start.tolist(), chosen.end.tolist(), chosen.tensor.tolist())
    return tuple(map(Fetch, *columns))
