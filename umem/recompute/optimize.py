"""`umem.optimize`: a model whose training steps keep fewer activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from .. import devices, startup, values
from ..errors import ConfigError, NotSupportedError, StateError
from .choose import LIVE_MODES

if TYPE_CHECKING:
    from torch import nn

    from .live import Report

    Model = TypeVar("Model", bound=nn.Module)
else:
    Model = TypeVar("Model")


def optimize(
    model: Model, *, mode: str = "umem", budget: str | int | None = None, device: str | None = None
) -> Model:
    """Let a model's forward pass drop activations, which backward rebuilds. The same model returns.

    At its first call in training for inputs of new shapes the model runs on fake tensors, and what
    to drop is planned from that; docs/optimize.md. Gradients are the same to the last bit where
    the device's kernels are deterministic. Works with umem on, which swaps what is kept, and off.

    Args:
        mode: "umem" (what makes the step fastest at the budget, with swapping where umem is on) or
            another of docs/optimize.md.
        budget: bytes of the device, as 8GiB, or a percentage of what the model's step takes without
            a plan. Not given: umem's budget where it is on, else the GPU's free memory.
        device: the profile whose figures plans reckon with; not given: the present device's.

    Raises:
        ConfigError: not a module, an unknown mode or device, or a bad budget.
        NotSupportedError: torch is missing, or the model is compiled or replicated.
        StateError: the model is optimized already.
    """
    startup.require_torch()
    from torch import nn

    from .live import Optimized

    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"umem.optimize({type(model).__name__}): allowed: a torch.nn.Module, whose forward "
            "pass is to keep less"
        )
    if mode not in LIVE_MODES:
        hint = values.did_you_mean(str(mode), LIVE_MODES)
        allowed = ", ".join(LIVE_MODES)
        raise ConfigError(f"mode={mode!r}: there is no such mode{hint}; allowed: {allowed}")
    if device is not None:
        devices.find(device)
    limit = _budget(budget)
    _check(model)
    Optimized(model, mode, limit, device).install()
    return model


def deoptimize(model: Model) -> Model:
    """Let the model keep all activations again; not optimized: nothing. The same model returns."""
    from .live import of

    found = of(model)
    if found is not None:
        found.remove()
    return model


def report(model: nn.Module) -> Report:
    """What became of the model's last training forward pass.

    Raises:
        StateError: the model is not optimized.
    """
    from .live import of

    found = of(model)
    if found is None:
        raise StateError("the model is not optimized; call umem.optimize(model) first")
    return found.report


def _budget(given: str | int | None) -> values.Budget:
    try:
        return values.parse_budget("auto" if given is None else str(given))
    except ValueError as error:
        raise ConfigError(
            f"budget={given!r}: {error}; allowed: auto, bytes as 8GiB, or a percentage of the "
            "step's own peak as 50%"
        ) from None


def _check(model: Any) -> None:
    import torch

    from .live import of

    if of(model) is not None:
        raise StateError("the model is optimized already; call umem.deoptimize(model) first")
    if isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
        raise NotSupportedError(
            f"{type(model).__name__} runs compiled code, whose ops cannot be run again one by one; "
            "optimize a module in eager mode"
        )
    if isinstance(model, torch.nn.DataParallel):
        raise NotSupportedError(
            "DataParallel copies the model in each step; use DistributedDataParallel, and optimize "
            "the module inside"
        )
