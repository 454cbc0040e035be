"""Figures for TensorBoard, Weights & Biases, or any logger that takes names and numbers."""

from __future__ import annotations

from ..base.native import core
from ..base.stats import Stats, plan_hit_share

_LEVELS = ("resident_bytes", "live_bytes", "host_bytes")
_FLOWS = {"in_bytes_per_step": "bytes_in", "out_bytes_per_step": "bytes_out",
          "faults_per_step": "faults"}  # fmt: skip


class Scalars:
    """Gives umem's figures as names and numbers each time it is called.

    ``scalars = umem.Scalars()``, and then in the loop ``wandb.log(scalars())``, or
    ``writer.add_scalar(name, value, step)`` for each of ``scalars().items()``.
    """

    def __init__(self, prefix: str = "umem/") -> None:
        """Start counting.

        Args:
            prefix: the prefix of each name.
        """
        self._prefix = prefix
        self._before = _stats()

    def __call__(self) -> dict[str, float]:
        """Return the figures now; flows are those since the last call.

        `resident_bytes`, `live_bytes` and `host_bytes` are bytes now. `in_bytes_per_step`,
        `out_bytes_per_step` and `faults_per_step` are means over the steps since the last call, and
        missing if no step ended since; `plan_hit_share` is the share of operators that followed the
        plan, from 0 to 1, and missing if none ran under a plan. While umem is off, levels and flows
        are those of the last session.
        """
        now, before = _stats(), self._before
        self._before = now
        found = {name: float(getattr(now, name)) for name in _LEVELS}
        steps = now.steps - before.steps
        if steps > 0:
            for name, field in _FLOWS.items():
                found[name] = (getattr(now, field) - getattr(before, field)) / steps
        share = plan_hit_share(
            now.plan_hits - before.plan_hits, now.plan_misses - before.plan_misses
        )
        if share is not None:
            found["plan_hit_share"] = share
        return {self._prefix + name: value for name, value in found.items()}


def _stats() -> Stats:
    return Stats(**core.stats(None))
