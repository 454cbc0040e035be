"""Models whose parameters are not there between forward and backward, which recomputation needs."""

from __future__ import annotations

from torch import nn

_FSDP = "torch.distributed.fsdp"
_ZERO_3 = "ds_id"  # what DeepSpeed sets on each parameter that it partitions
_MANAGED = "_is_fsdp_managed_module"  # what the first FSDP sets on the modules inside of it


def sharder_of(model: nn.Module) -> str | None:
    """Return what frees a model's parameters within the step, by its name; None if nothing does."""
    if any(_is_sharded(module) for module in model.modules()):
        return "FSDP"
    return "ZeRO-3" if any(hasattr(p, _ZERO_3) for p in model.parameters()) else None


def _is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP, the first or the second, has taken this module."""
    taken = any(of.__module__.startswith(_FSDP) for of in type(module).__mro__)
    return taken or getattr(module, _MANAGED, False) is True
