"""umem: train with more memory than the device has, without changing the program.

`umem.enable()` before the program makes tensors, or `UMEM=1 python train.py`, or
`umem run train.py`. Importing this package is cheap: torch and the native core are loaded on use.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

# A checkout's package has no native core: this finds the one of the installed package.
__path__ = pkgutil.extend_path(__path__, __name__)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import cuda_core as cuda_core
    from . import cupy as cupy
    from .checkpoint.load import Loaded, load_checkpoint
    from .errors import (
        CheckpointError,
        ConfigError,
        DriverError,
        NotSupportedError,
        OutOfMemoryError,
        PlanError,
        StateError,
        TraceError,
        UmemError,
    )
    from .hints import Hold, advise, discard, evict, exclude, keep, pin, prefetch, tag, unpin
    from .integrations.buffer import Buffer
    from .integrations.dlpack import export
    from .optimizers.paging import PagedOptimizer, page_optimizer
    from .recompute.optimize import deoptimize, optimize
    from .runtime import (
        Session,
        disable,
        enable,
        is_enabled,
        reset_peak_stats,
        set_budget,
        stats,
        step,
        summary,
    )
    from .sleeping import Sleep, sleep, wake
    from .statistics import Stats
    from .whereabouts import Where, scope, tensors, where

__all__ = [
    "Buffer",
    "CheckpointError",
    "ConfigError",
    "DriverError",
    "Hold",
    "Loaded",
    "NotSupportedError",
    "OutOfMemoryError",
    "PagedOptimizer",
    "PlanError",
    "Session",
    "Sleep",
    "StateError",
    "Stats",
    "TraceError",
    "UmemError",
    "Where",
    "__version__",
    "advise",
    "deoptimize",
    "disable",
    "discard",
    "enable",
    "evict",
    "exclude",
    "export",
    "is_enabled",
    "keep",
    "load_checkpoint",
    "optimize",
    "page_optimizer",
    "pin",
    "prefetch",
    "reset_peak_stats",
    "scope",
    "set_budget",
    "sleep",
    "stats",
    "step",
    "summary",
    "tag",
    "tensors",
    "unpin",
    "wake",
    "where",
]


# Modules of frameworks, some of which cannot be imported without theirs.
_FRAMEWORKS = ("cuda_core", "cupy")
_HOMES = {
    "Buffer": "integrations.buffer",
    "Stats": "statistics",
    "export": "integrations.dlpack",
    **dict.fromkeys(("Loaded", "load_checkpoint"), "checkpoint.load"),
    **dict.fromkeys(("optimize", "deoptimize"), "recompute.optimize"),
    **dict.fromkeys(("PagedOptimizer", "page_optimizer"), "optimizers.paging"),
    **dict.fromkeys(("Sleep", "sleep", "wake"), "sleeping"),
    **dict.fromkeys(("Where", "scope", "tensors", "where"), "whereabouts"),
    **dict.fromkeys(
        (
            "Hold",
            "advise",
            "discard",
            "evict",
            "exclude",
            "keep",
            "pin",
            "prefetch",
            "tag",
            "unpin",
        ),
        "hints",
    ),
}


def __getattr__(name: str) -> object:
    """Public names load their module at first use, so that autoload costs nothing when off."""
    import importlib

    if name in _FRAMEWORKS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "errors" if name.endswith("Error") else _HOMES.get(name, "runtime")
    value: object = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_FRAMEWORKS})
