"""The ways to choose what is dropped, by name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...devices import DeviceProfile
from ...errors import PlanError
from ...policies.occupancy import capacity
from ...trace.step import StepTrace
from ...values import PAGE_BYTES
from ..analysis import works_of
from ..recording import Recording
from . import candidates
from .capuchin import capuchin
from .graph import Graph
from .plan import RecomputePlan, check
from .rewrite import Rewritten, rewrite
from .search import Choice, Search


class Planner:
    """One step at one budget under any of MODES; the search runs once for all that need it."""

    def __init__(self, graph: Graph, device: DeviceProfile, budget: int) -> None:
        self.graph, self.device, self.budget = graph, device, budget
        self._search = Search(graph, device, budget)
        self._finalists: list[Choice] = []

    def plan(self, mode: str) -> Rewritten | None:
        """The step as that mode rewrites it; None: it fits by no way that the mode knows.

        Raises:
            ConfigError: there is no such mode.
        """
        check(mode)
        if mode != "umem":
            return self._other(mode)
        return self._rewritten(min(self._chosen(), key=self._search.estimate_us))

    def finalists(self) -> list[Rewritten]:
        """What mode umem chooses from: what the search found, and what it must not be slower than.

        The search's choice; one for half of the link, and one for all of it; the best known without
        swapping; nothing but swapping.
        """
        return [self._rewritten(choice) for choice in self._chosen()]

    def _chosen(self) -> list[Choice]:
        if not self._finalists:
            search = self._search
            choices = [search.best(), *search.others(), search.recompute_only()]
            known = [choice for choice in (*choices, search.swap_only) if choice is not None]
            self._finalists = list({id(choice): choice for choice in known}.values())
        return self._finalists

    def _rewritten(self, choice: Choice) -> Rewritten:
        return rewrite(self.graph, *choice.selection, choice.mode)

    def _other(self, mode: str) -> Rewritten | None:
        graph = self.graph
        if mode == "recompute":
            alone = self._search.recompute_only(at_any_time=True)
            return None if alone is None else self._rewritten(alone)
        if mode == "swap":
            return self._rewritten(self._search.swap_only)
        if mode == "per_block":
            return rewrite(graph, *candidates.per_block(graph))
        if mode == "capuchin":
            room = capacity(graph.step.pieces, self.budget)
            return rewrite(graph, *capuchin(graph, self._search.link, room))
        cheap = candidates.hybrid(graph)
        speed = rewrite(graph, *cheap, "speed")
        if mode in ("hybrid", "speed"):
            return speed
        memory = rewrite(graph, *cheap, "memory")
        if mode == "cost" and speed.step.peak_bytes <= max(memory.step.peak_bytes, self.budget):
            return speed
        return memory


def graph_of(step: StepTrace, recording: Recording) -> tuple[Graph, Sequence[int]]:
    """The graph of a planned step, and of each of its ops the index in `recording.forward`.

    -1 is of an op behind the forward pass.

    Raises:
        PlanError: the step is not the recording's.
    """
    works = works_of(step, recording)
    if not works:
        raise PlanError(
            "the ops of the step are not those of the recording; allowed: the last step of its own"
            " events"
        )
    ordinals = [work.ordinal for work in works]
    return Graph(step, np.array(ordinals) >= 0), ordinals


def executable(new: Rewritten, recording: Recording, ordinals: Sequence[int]) -> RecomputePlan:
    """What a running program needs of a rewritten step."""
    drop = sorted({ordinals[op] for op in new.drop_ops})
    return RecomputePlan(recording.forward, tuple(drop), new.mode, keep_below=PAGE_BYTES)
