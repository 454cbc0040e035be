"""The callback through which the native engine calls a policy's `victims`.

`_core.set_advisor(victim_callback(policy.victims))`, `_core.set_advisor(None)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .base import Candidate, CandidateView

Victims = Callable[[CandidateView, int], Iterable[int]]
Row = tuple[int, int, str, str, int, bool]


def victim_callback(victims: Victims) -> Callable[[list[Row], int, int, int], Iterable[int]]:
    """Wrap `victims(view, need)` as the callable that the engine calls.

    It is called when an op or a large allocation lacks `need` bytes, and returns the ids of the
    blocks to evict, in that order. If they are too few, or some can no longer leave, the native
    policy chooses the rest.
    """

    def asked(rows: list[Row], resident: int, budget: int, need: int) -> Iterable[int]:
        return victims(CandidateView(tuple(map(Candidate._make, rows)), resident, budget), need)

    return asked
