"""What a program executes of a recompute plan; docs/recompute.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ...errors import ConfigError, PlanError
from ...values import did_you_mean

Keep = Literal["speed", "memory"]

# What each drops; all swap the rest with the default policy, as far as the budget needs it.
MODES = {
    "umem": "what the search finds fastest, swapping and recomputing together",
    "swap": "nothing",
    "recompute": "what the search finds fastest without any swapping",
    "hybrid": "cheap results (norms, activation functions); those of products swap",
    "capuchin": "by tensor: swaps that hide first, then the most bytes a second of recomputation",
    "speed": "cheap results; copies stay until their last use",
    "memory": "cheap results; copies go after each use",
    "cost": "cheap results; copies stay, unless the step's peak would be higher",
    "per_block": "all but the inputs of blocks",
}


def check(mode: str, *others: str) -> None:
    """Raises ConfigError where there is no such mode; `others` are allowed beside MODES."""
    known = [*others, *MODES]
    if mode not in known:
        raise ConfigError(
            f"there is no way {mode!r} to recompute{did_you_mean(mode, known)}; allowed: "
            f"{', '.join(known)}"
        )


@dataclass(frozen=True)
class RecomputePlan:
    """What the forward pass does not keep for backward.

    Args:
        names: overload names ("aten.relu.default") of all ops of the forward pass, in order, as a
            dispatch mode below autograd sees them: views and ops without results too. A running
            program is compared with them one by one.
        drop: ascending indices into `names` of the ops whose outputs are not kept for backward,
            and rebuilt there. Ops that change a dropped output in place are among them, and so are
            those whose outputs autograd does not save but a rebuilding needs: the output of an op
            that is not here, where a rebuilding needs it, is held from the forward pass on.
        mode: whether a rebuilt tensor stays until nothing in the rest of backward needs it, itself
            or a rebuilding from it (speed), or is freed after the op that wanted it (memory).
        keep_below: bytes; smaller outputs of the ops in `drop` are kept all the same, such as the
            mean and deviation of a norm, which would cost its whole op to rebuild.

    Raises:
        PlanError: `drop` is not ascending or not within `names`, or there is no such mode.
    """

    names: tuple[str, ...] = field(repr=False)  # hundreds
    drop: tuple[int, ...]
    mode: Keep = "speed"
    keep_below: int = 0

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.drop, self.drop[1:], strict=False))
        if self.drop and not (ascending and self.drop[0] >= 0 and self.drop[-1] < len(self.names)):
            raise PlanError(
                f"drop={self.drop[:8]}...; allowed: ascending indices below {len(self.names)}, the "
                "number of ops in names"
            )
        if self.mode not in get_args(Keep):
            raise PlanError(f"mode={self.mode!r}; allowed: {', '.join(get_args(Keep))}")

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` takes it."""
        return {
            "names": list(self.names),
            "drop": list(self.drop),
            "mode": self.mode,
            "keep_below": self.keep_below,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RecomputePlan:
        """The plan that `as_dict` gave.

        Raises:
            PlanError: it is no such mapping.
        """
        try:
            names, drop, mode = fields["names"], fields["drop"], fields["mode"]
            if isinstance(names, str) or not all(type(i) is int for i in drop):
                raise TypeError("names is a list of strings, drop one of integers")
            keep_below = int(fields["keep_below"])
            return cls(tuple(map(str, names)), tuple(drop), mode, keep_below)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"no recompute plan ({error!r}); allowed: what RecomputePlan.as_dict gave"
            ) from None
