"""`umem.optimize`: training steps of a model that keep fewer activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ..base import device_profiles
from ..config import parsers
from ..errors import ConfigError, NotSupportedError, StateError, did_you_mean
from ..integrations.torch.version import require_torch
from .executor.choose import LIVE_MODES

if TYPE_CHECKING:
    from torch import nn

    from .executor.module import RecomputeReport

    Model = TypeVar("Model", bound=nn.Module)
else:
    Model = TypeVar("Model")


def optimize(
    model: Model, *, mode: str = "auto", budget: str | int | None = None, device: str | None = None
) -> Model:
    """Make a model's forward pass drop activations that backward rebuilds; return the same model.

    The first training step for inputs of new shapes is recorded while it runs, and the activations
    that the next ones drop are planned from the record (docs/optimize.md): no code of the program
    runs a second time. Gradients are bit-identical where the device's kernels are deterministic.
    This works with umem off and on; umem swaps the activations that are kept.

    Args:
        model: the model to change.
        mode: "auto" (the fastest step at the budget, with swapping where umem is on) or another
            mode of docs/optimize.md.
        budget: device bytes, such as 8GiB, or a percentage of the peak of the model's step without
            a plan. None: umem's budget if umem is on, else the GPU's free memory.
        device: name of the device profile to plan with; None: that of the present device.

    Raises:
        ConfigError: `model` is not a module, the mode or device is unknown, or the budget is bad.
        NotSupportedError: torch is missing, the model is compiled, replicated or sharded, or its
            `forward` is no function.
        StateError: the model is optimized already.
    """
    require_torch()
    from torch import nn

    from .executor.module import OptimizedModule

    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"umem.optimize({type(model).__name__}): allowed: a torch.nn.Module, the model to "
            "optimize"
        )
    if mode not in LIVE_MODES:
        hint = did_you_mean(str(mode), LIVE_MODES)
        allowed = ", ".join(LIVE_MODES)
        raise ConfigError(f"unknown mode {mode!r}{hint}; allowed: {allowed}")
    if device is not None:
        device_profiles.find(device)
    limit = _budget(budget)
    _check(model)
    OptimizedModule(mode, limit, device).install(model)
    return model


def deoptimize(model: Model) -> Model:
    """Make the model keep all activations again, if it is optimized; return the same model."""
    from .executor import forwards

    forwards.restore(model)
    return model


def report(model: nn.Module) -> RecomputeReport:
    """Return a report on the model's last training forward pass.

    Raises:
        StateError: the model is not optimized.
    """
    from .executor.module import optimized

    found = optimized(model)
    if found is None:
        raise StateError("the model is not optimized; call umem.optimize(model) first")
    return found.report


def _budget(given: str | int | None) -> parsers.Budget:
    try:
        return parsers.parse_budget("auto" if given is None else str(given))
    except ValueError as error:
        raise ConfigError(
            f"budget={given!r}: {error}; allowed: auto, bytes such as 8GiB, or a percentage of the "
            "step's own peak such as 50%"
        ) from None


def _check(model: Any) -> None:
    import torch

    from .executor.module import optimized
    from .executor.sharded import sharder_of

    if optimized(model) is not None:
        raise StateError("the model is optimized already; call umem.deoptimize(model) first")
    if isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
        raise NotSupportedError(
            f"{type(model).__name__} runs compiled code, whose ops cannot be run again one by one; "
            "optimize a module in eager mode"
        )
    if (sharder := sharder_of(model)) is not None:
        raise NotSupportedError(
            f"{sharder} frees the model's parameters between forward and backward, and "
            "recomputation needs them; use its activation checkpointing, or DistributedDataParallel"
        )
    if isinstance(model, torch.nn.DataParallel):
        raise NotSupportedError(
            "DataParallel copies the model in each step; use DistributedDataParallel, and optimize "
            "the module inside"
        )
