"""Forward passes under handmade plans: their ops, and the ops to drop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from umem.recompute.planner.plan import RecomputePlan

Freed = Literal["none", "some", "all"]  # which dropped values are freed after each use
FREED = get_args(Freed)

# Ops without an output of their own to drop.
_VIEWS = ("view", "t.", "transpose", "expand", "select", "slice", "unsqueeze", "permute", "detach",
          "split", "alias", "squeeze", "empty", "_unsafe_view")  # fmt: skip


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if str(func) != "aten.detach.default":  # autograd's own, needless with hooks
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def names_of(forward: Callable[[], object]) -> tuple[str, ...]:
    with _Names() as mode:
        forward()
    return tuple(mode.names)


def freed_of(drop: list[int], freed: Freed) -> tuple[int, ...]:
    """Return the ops whose results are freed after each use; "some": three of five in a row."""
    if freed == "some":
        return tuple(drop[i] for i in range(len(drop)) if i % 5 in (0, 1, 3))
    return tuple(drop) if freed == "all" else ()


def plan_for(
    forward: Callable[[], object], keep: tuple[str, ...] = (), freed: Freed = "none"
) -> RecomputePlan:
    """Drop every output but those of the ops named in `keep`; runs `forward` to see its ops."""
    names = names_of(forward)
    drop = [
        i
        for i, name in enumerate(names)
        if not name.startswith(tuple(f"aten.{bare}" for bare in (*_VIEWS, *keep)))
    ]
    return RecomputePlan(names, tuple(drop), freed_of(drop, freed))


def gradients(net: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
