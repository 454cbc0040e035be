"""A policy's own `victims`, asked by the native engine while a program runs.

`_core.set_advisor(victim_callback(policy.victims))`, `_core.set_advisor(None)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .base import Candidate, CandidateView

Victims = Callable[[CandidateView, int], Iterable[int]]
Row = tuple[int, int, str, str, int, bool]


def victim_callback(victims: Victims) -> Callable[[list[Row], int, int, int], Iterable[int]]:
    """Wrap `victims(view, need)` as the callable that the engine calls.

    It is asked when an op or a large allocation is short of `need` bytes of room, and says the ids
    of the blocks to evict, first to go first. What it leaves open, and what cannot leave any more,
    is made up for by the native policy.
    """

    def asked(rows: list[Row], resident: int, budget: int, need: int) -> Iterable[int]:
        return victims(CandidateView(tuple(map(Candidate._make, rows)), resident, budget), need)

    return asked
