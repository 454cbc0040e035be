"""Figures for TensorBoard, Weights & Biases, or any logger that takes names and numbers."""

from __future__ import annotations

from ..base.native import core
from ..base.stats import plan_hit_share
from .metrics import growth, is_measured

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
        self._before = core.stats(None)

    def __call__(self) -> dict[str, float]:
        """Return the figures now; flows are those since the last call.

        `resident_bytes`, `live_bytes` and `host_bytes` are bytes now. `in_bytes_per_step`,
        `out_bytes_per_step` and `faults_per_step` are means over the steps since the last call, and
        missing if no step ended since; a GPU's driver does not report faults. `plan_hit_share` is
        the share of operators that followed the plan, from 0 to 1, and missing if none ran under a
        plan. While umem is off, levels and flows are those of the last session.
        """
        now = core.stats(None)
        grown = growth(now, self._before)
        self._before = now
        found = {name: float(now[name]) for name in _LEVELS}
        if grown["steps"]:
            device = core.current_options().device
            flows = {name: field for name, field in _FLOWS.items() if is_measured(field, device)}
            for name, field in flows.items():
                found[name] = grown[field] / grown["steps"]
        share = plan_hit_share(grown["plan_hits"], grown["plan_misses"])
        if share is not None:
            found["plan_hit_share"] = share
        return {self._prefix + name: value for name, value in found.items()}
