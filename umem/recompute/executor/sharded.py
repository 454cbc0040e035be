"""Models whose parameters, which recomputation needs, are absent between forward and backward."""

from __future__ import annotations

from torch import nn

_FSDP = "torch.distributed.fsdp"
_ZERO_3 = "ds_id"  # set by DeepSpeed on each parameter that it partitions
_MANAGED = "_is_fsdp_managed_module"  # set by FSDP1 on the modules inside of it


def sharder_of(model: nn.Module) -> str | None:
    """Return the name of the library that frees a model's parameters within the step, or None."""
    if any(_is_sharded(module) for module in model.modules()):
        return "FSDP"
    return "ZeRO-3" if any(hasattr(p, _ZERO_3) for p in model.parameters()) else None


def _is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP1 or FSDP2 has wrapped this module."""
    taken = any(of.__module__.startswith(_FSDP) for of in type(module).__mro__)
    return taken or getattr(module, _MANAGED, False) is True
