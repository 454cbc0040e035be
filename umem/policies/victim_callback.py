"""The callback through which the native engine calls a policy's `victims`.

`_core.set_advisor(victim_callback(policy.victims, policy.name))`, `_core.set_advisor(None)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from ..errors import kind_of
from .base import Candidate, CandidateView

Victims = Callable[[CandidateView, int], Iterable[int]]
Row = tuple[int, int, str, str, int, bool]


def victim_callback(
    victims: Victims, name: str
) -> Callable[[list[Row], int, int, int], Iterable[int]]:
    """Wrap `victims(view, need)` of the policy `name` as the callable that the engine calls.

    It is called when an op or a large allocation lacks `need` bytes, and returns the ids of the
    blocks to evict, in that order. If they are too few, or some can no longer leave, the native
    policy chooses the rest.

    The callable raises TypeError if the policy returns anything but ids.
    """

    def asked(rows: list[Row], resident: int, budget: int, need: int) -> Iterable[int]:
        view = CandidateView(tuple(map(Candidate._make, rows)), resident, budget)
        answer: object = victims(view, need)
        if not isinstance(answer, Iterable):
            raise _refusal(name, kind_of(answer))
        ids = list(islice(answer, len(rows)))  # an iterator may have no end
        for one in ids:
            if not hasattr(one, "__index__"):
                raise _refusal(name, f"{kind_of(answer)} with {kind_of(one)}")
        return ids

    return asked


def _refusal(name: str, returned: str) -> TypeError:
    return TypeError(f"policy {name}: victims returned {returned}; allowed: ids of view.blocks")
