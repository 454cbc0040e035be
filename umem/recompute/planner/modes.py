"""The modes of recomputation, each a way to choose the tensors to drop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...analysis.summary import costs_of
from ...base.device_profiles import DeviceProfile
from ...base.units import PAGE_BYTES
from ...capture.recording import Recording
from ...errors import PlanError
from ...trace.step_trace import StepTrace
from . import candidates
from .candidates import Selection
from .graph import RecomputeGraph
from .plan import RecomputePlan, check
from .rewrite import Rewritten, rewrite
from .search import Choice, Search


class RecomputePlanner:
    """A planner for one step at one budget; modes that need the search share one run of it."""

    def __init__(
        self,
        graph: RecomputeGraph,
        device: DeviceProfile,
        budget: int,
        known_good: Sequence[Selection] = (),
    ) -> None:
        """Plan `graph`; `known_good` are selections for a step with the same tensors."""
        self.graph, self.device, self.budget = graph, device, budget
        self._search = Search(graph, device, budget, known_good)
        self._finalists: list[Choice] = []

    def plan(self, mode: str) -> Rewritten | None:
        """Return the step as the mode rewrites it; None if the mode finds no step that fits.

        Raises:
            ConfigError: the mode is unknown.
        """
        check(mode)
        if mode != "auto":
            return self._other(mode)
        return self._rewritten(min(self._chosen(), key=self._search.estimate_us))

    def shortlist(self) -> list[Rewritten]:
        """Return the candidates of mode auto; the result must not be slower than any.

        These are the search's choice, one for half of the link and one for all of it, the best
        known without swapping, and swapping alone.
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
        return rewrite(self.graph, *choice.selection)

    def _other(self, mode: str) -> Rewritten | None:
        graph = self.graph
        if mode == "recompute":
            alone = self._search.recompute_only(at_any_time=True)
            return None if alone is None else self._rewritten(alone)
        if mode == "swap":
            return self._rewritten(self._search.swap_only)
        if mode == "per_block":
            return rewrite(graph, *candidates.per_block(graph))
        cheap = candidates.cheap(graph)
        every = np.array(graph.may_drop, bool)
        return rewrite(graph, *(cheap if mode == "speed" else cheap._replace(free=every)))


def graph_of(step: StepTrace, recording: Recording) -> tuple[RecomputeGraph, Sequence[int]]:
    """Return the graph of a planned step, and for each of its ops the index in `recording.forward`.

    The index is -1 for an op after the forward pass.

    Raises:
        PlanError: the step does not belong to the recording.
    """
    costs = costs_of(step, recording)
    if not costs:
        raise PlanError(
            "the ops of the step are not those of the recording; allowed: the last step made from "
            "the recording's own events"
        )
    ordinals = [cost.ordinal for cost in costs]
    return RecomputeGraph(step, np.array(ordinals) >= 0), ordinals


def executable(new: Rewritten, recording: Recording, ordinals: Sequence[int]) -> RecomputePlan:
    """Return the plan with which a running program executes a rewritten step."""
    drop, free = (sorted({ordinals[op] for op in ops}) for ops in (new.drop_ops, new.free_ops))
    return RecomputePlan(recording.forward, tuple(drop), tuple(free), keep_below=PAGE_BYTES)
