"""Recompute plans as a program executes them; docs/recompute.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError, PlanError, did_you_mean

# The tensors that each mode drops; the default policy swaps the rest as the budget requires.
MODES = {
    "auto": "the search's fastest choice, with swapping and recomputation together",
    "swap": "nothing",
    "recompute": "the search's fastest choice without swapping",
    "per_block": "all but the inputs of blocks",
    "speed": "cheap results (norms, activation functions); copies live until their last use",
    "memory": "cheap results; copies are freed after each use",
}


def check(mode: str, *others: str) -> None:
    """Raise ConfigError for an unknown mode; `others` are allowed in addition to MODES."""
    known = [*others, *MODES]
    if mode not in known:
        raise ConfigError(
            f"unknown recompute mode {mode!r}{did_you_mean(mode, known)}; allowed: "
            f"{', '.join(known)}"
        )


@dataclass(frozen=True)
class RecomputePlan:
    """A plan: the results of the forward pass that are not kept for backward.

    Args:
        names: overload names ("aten.relu.default") of all ops of the forward pass, in order, as a
            dispatch mode below autograd sees them, including views and ops without results. A
            running program is compared with them one by one.
        drop: ascending indices into `names` of the ops whose outputs are not kept for backward but
            rebuilt there. They include ops that change a dropped output in place, and ops whose
            outputs autograd does not save but a rebuild needs: the output of an op that is not
            listed is kept after the forward pass if a rebuild needs it.
        free: ascending indices, out of `drop`, of the ops whose rebuilt outputs are freed after
            each use. Other rebuilt outputs live until the rest of backward no longer needs them,
            nor a rebuild from them.
        keep_below: smaller outputs, in bytes, of the ops in `drop` are kept, such as the mean and
            deviation of a norm, because rebuilding them would cost the whole op.

    Raises:
        PlanError: `drop` is not ascending or not within `names`, or `free` not within `drop`.
    """

    names: tuple[str, ...] = field(repr=False)  # hundreds
    drop: tuple[int, ...]
    free: tuple[int, ...] = ()
    keep_below: int = 0

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.drop, self.drop[1:], strict=False))
        if self.drop and not (ascending and self.drop[0] >= 0 and self.drop[-1] < len(self.names)):
            raise PlanError(
                f"drop={self.drop[:8]}...; allowed: ascending indices below {len(self.names)}, the "
                "number of ops in names"
            )
        if sorted(set(self.drop) & set(self.free)) != list(self.free):
            raise PlanError(f"free={self.free[:8]}...; allowed: ascending indices out of drop")

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as a dictionary for JSON."""
        return {
            "names": list(self.names),
            "drop": list(self.drop),
            "free": list(self.free),
            "keep_below": self.keep_below,
        }
