"""A recorded step in the form that is planned."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..base.native import core

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile
    from ..monitor.summary import StepCost
    from ..trace.step_trace import Ints, StepTrace
    from .step_recording import StepRecording


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A recorded step as it was planned."""

    trace: StepTrace  # without segments
    addresses: Ints  # [m] of its tensors; 0: unknown
    device: DeviceProfile
    budget: int  # bytes
    # By budget: a live view asks again at each redraw, and to plan a large step takes seconds.
    _costs: dict[int, StepCost] = field(default_factory=dict, init=False, repr=False)

    @property
    def in_segments(self) -> StepTrace:
        """The step with segments in place of its small tensors, as in plans."""
        from ..trace.segments import with_segments

        return with_segments(self.trace, self.addresses)

    def cost(self, budget: int) -> StepCost:
        """Return the cost of a budget in bytes, as the default policy estimates it.

        It is estimated once for each budget.
        """
        if budget not in self._costs:
            self._costs[budget] = self._cost(budget)
        return self._costs[budget]

    def _cost(self, budget: int) -> StepCost:
        from ..monitor.summary import StepCost
        from ..policies.default.planner import Auto

        step = self.in_segments
        us = Auto().estimate_us(step, self.device, budget, compare=False)
        trains = not {"grad", "optimizer"}.isdisjoint(self.trace.tags)
        return StepCost(us / step.compute_us if step.compute_us else 1.0, step.peak_bytes, trains)

    def for_policy(self, recording: StepRecording) -> tuple[StepTrace, Ints]:
        """Return the step as policies get it, and where its tensors are when it begins again.

        In the step, pinned and excluded tensors are exempt.
        """
        import numpy as np

        trace = self.in_segments
        places = _at_begin(trace, recording.addresses(trace.source))
        spans = np.where(trace.large, (places, trace.bytes), 0).T.tolist()
        exempt = np.array(core.staying([(place, size) for place, size in spans]), bool)
        return replace(trace, exempt=exempt if exempt.any() else None), places


def _at_begin(trace: StepTrace, addresses: Ints) -> Ints:
    """Return where each tensor is when the step begins again; 0: unknown.

    Args:
        trace: the step.
        addresses: [m] of its tensors; a segment is at its place.
    """
    import numpy as np

    from ..trace.step_trace import Kind

    # The next step begins with what this one made in place of a carried tensor.
    tensor = np.where(trace.kind == Kind.CARRIED, trace.next_alias, np.arange(trace.n_tensors))
    places = np.where(tensor < 0, 0, addresses[tensor])
    return places if trace.place is None else np.where(trace.place > 0, trace.place, places)
