"""Why bytes moved or did not, and what stalls waited for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from ..base.units import PAGE_BYTES
from ..trace.step_trace import Bools
from .timeline import OTHER, MoveKind, Timeline

SMALL = "small tensors, freed memory"  # the name of pages without a live, large tensor


class Cause(NamedTuple):
    """Bytes of a step with one reason, by the role of the tensors."""

    name: str
    moved: bool  # over the link
    meaning: str
    by_role: dict[str, int]

    @property
    def bytes(self) -> int:
        """All of them."""
        return sum(self.by_role.values())


class Wait(NamedTuple):
    """A stall, or the part of one that an operator spent on one tensor."""

    op: int  # the waiting operator
    us: float
    tensor: int  # the late tensor, or the one that needed memory; OTHER: no large one
    why: str  # a key of WHY
    late_ops: int  # operators that the transfer would have had to start earlier


WHY = {
    "late": "fetched too late",
    "fault": "not fetched ahead: page faults",
    "room": "waiting until other bytes have left",
    "queue": "waiting behind transfers that it does not need",
    "host": "waiting for the host's work",
    "other": "other",
}


def roles(line: Timeline) -> list[str]:
    """Return the role of each tensor; a tensor without a tag is `untagged`."""
    return [tag or "untagged" for tag in line.step.tags]


def bytes_by_cause(line: Timeline) -> list[Cause]:
    """Return the bytes that moved in the step, and those that moved needlessly."""
    moves, of = line.moves, roles(line)

    def by_role(chosen: Bools) -> dict[str, int]:
        sums: defaultdict[str, int] = defaultdict(int)
        for tensor, pages in zip(
            moves.tensor[chosen].tolist(), moves.pages[chosen].tolist(), strict=True
        ):
            sums[SMALL if tensor == OTHER else of[tensor]] += pages * PAGE_BYTES
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    kind = moves.kind
    came = kind == MoveKind.IN
    leaves = np.isin(kind, (MoveKind.OUT, MoveKind.DROP, MoveKind.DISCARD, MoveKind.FREE))
    unused = by_role(leaves & moves.unused)
    ahead = by_role(came & ~moves.fault)
    # Useless fetches are prefetches: an access follows each fault.
    needed = {role: count - unused.get(role, 0) for role, count in ahead.items()}
    return [
        Cause("in, needed", True, "fetched ahead of its use, and used", _positive(needed)),
        Cause("in, by faults", True, "fetched when an access had to wait",
              by_role(came & moves.fault)),
        Cause("in, unused", True, "fetched, and not used before it left again", unused),
        Cause("out, needed later", True, "left, with contents", by_role(kind == MoveKind.OUT)),
        Cause("out, ahead", True, "copied to the host before it had to leave",
              by_role(kind == MoveKind.COPY)),
        Cause("unchanged, not copied", False, "left; the host had the same contents",
              by_role(kind == MoveKind.DROP)),
        Cause("dead, never moved", False, "contents that no operator reads again",
              by_role(kind == MoveKind.DISCARD)),
    ]  # fmt: skip


def _positive(counts: dict[str, int]) -> dict[str, int]:
    return {role: count for role, count in counts.items() if count > 0}


def waits(line: Timeline) -> list[Wait]:
    """Attribute each stall to the transfers that its operator waited for.

    A stall is divided among the transfers of tensors that the operator accesses, by each one's
    share of its time. Without such a transfer the operator waits for device memory: other bytes
    must leave first, or transfers for later operators must arrive.
    """
    stalls = line.stall_us
    stalled = np.flatnonzero(stalls > 0).tolist()
    if not stalled:
        return []
    came = _in_time_order(line, MoveKind.IN)
    went = _in_time_order(line, MoveKind.OUT, MoveKind.COPY)
    filled = _filled(line)
    host = _in_time_order(line, MoveKind.HOST)
    step, before = line.step, line.step.begin_twice_us.tolist()
    starts, accessed = step.access_start.tolist(), step.access_tensor.tolist()
    found: list[Wait] = []
    for op in stalled:
        begin, us = float(line.wait_us[op]), float(stalls[op])
        end = begin + us
        used = set(accessed[starts[op] : starts[op + 1]])
        # It should have started in this step or in the previous one.
        twice = op + step.n_ops
        late = twice - max(bisect_right(before, before[twice] - us) - 1, 0)
        working = {tensor: overlap for overlap, tensor, _ in host.overlapping(begin, end)}
        coming = came.overlapping(begin, end)
        parts = [part for part in coming if part[1] in used or part[1] == OTHER]
        if total := sum(overlap for overlap, _, _ in parts):
            found += [
                Wait(op, us * overlap / total, tensor, _why(tensor, fault, working), late)
                for overlap, tensor, fault in parts
            ]
        elif working:
            found.append(
                Wait(op, us, max(working.items(), key=lambda item: item[1])[0], "host", late)
            )
        elif went.overlapping(begin, end):
            found.append(Wait(op, us, filled.get(op, OTHER), "room", late))
        elif coming:
            found.append(Wait(op, us, max(coming)[1], "queue", late))
        else:
            found.append(Wait(op, us, OTHER, "other", late))
    return found


def _filled(line: Timeline) -> dict[int, int]:
    """Return the tensor that each op gives the most new memory on the device."""
    moves = line.moves.only(MoveKind.FILL, MoveKind.IN)
    moves = moves.where(moves.tensor != OTHER)
    moves = moves.where(np.lexsort((moves.tensor, moves.pages, moves.op)))
    last = np.flatnonzero(np.diff(moves.op, append=-1) != 0)  # the largest of each op
    return dict(zip(moves.op[last].tolist(), moves.tensor[last].tolist(), strict=True))


def _why(tensor: int, fault: bool, working: Collection[int]) -> str:
    if tensor in working:  # it can be fetched only after the host's work
        return "host"
    return "fault" if fault else "late"


class _Lane:
    """Transfers of one direction; they follow each other, so both columns ascend."""

    def __init__(self, start: list[float], end: list[float], tensor: list[int], fault: list[bool]):
        self._start, self._end, self._tensor, self._fault = start, end, tensor, fault

    def overlapping(self, begin: float, end: float) -> list[tuple[float, int, bool]]:
        """Return the time in an interval, the tensor and whether it faulted, of each transfer."""
        at = bisect_left(self._end, begin)
        found = []
        while at < len(self._start) and self._start[at] < end:
            overlap = min(self._end[at], end) - max(self._start[at], begin)
            if overlap > 0:
                found.append((overlap, self._tensor[at], self._fault[at]))
            at += 1
        return found


def _in_time_order(line: Timeline, *kinds: MoveKind) -> _Lane:
    moves = line.lane(*kinds)
    return _Lane(
        moves.start_us.tolist(),
        moves.end_us.tolist(),
        moves.tensor.tolist(),
        moves.fault.tolist(),
    )
