"""`lru`: on demand, the least recently used leaves."""

from __future__ import annotations

from ..devices import DeviceProfile
from ..trace.step import StepTrace


class Lru:
    """An op's absent inputs come in before it; under pressure the least recently used leaves.

    Native: no plan. Optimal for a stack of activations with unlimited overlap forgone, and the
    worst there is for a cycle of weights. Source: Belady, "A study of replacement algorithms for a
    virtual-storage computer", IBM Systems Journal 5(2), 1966.
    """

    name = "lru"

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> None:  # noqa: ARG002
        """None: the engine decides under pressure."""
        return
