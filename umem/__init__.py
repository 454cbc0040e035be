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
    from .errors import (
        ConfigError,
        DriverError,
        NotSupportedError,
        OutOfMemoryError,
        PlanError,
        StateError,
        TraceError,
        UmemError,
    )
    from .recompute.optimize import deoptimize, optimize
    from .runtime import (
        Session,
        advise,
        disable,
        enable,
        evict,
        is_enabled,
        prefetch,
        reset_peak_stats,
        set_budget,
        stats,
        step,
        summary,
    )
    from .sleeping import Sleep, sleep, wake
    from .statistics import Stats

__all__ = [
    "ConfigError",
    "DriverError",
    "NotSupportedError",
    "OutOfMemoryError",
    "PlanError",
    "Session",
    "Sleep",
    "StateError",
    "Stats",
    "TraceError",
    "UmemError",
    "__version__",
    "advise",
    "deoptimize",
    "disable",
    "enable",
    "evict",
    "is_enabled",
    "optimize",
    "prefetch",
    "reset_peak_stats",
    "set_budget",
    "sleep",
    "stats",
    "step",
    "summary",
    "wake",
]
_HOMES = {
    "Stats": "statistics",
    **dict.fromkeys(("optimize", "deoptimize"), "recompute.optimize"),
    **dict.fromkeys(("Sleep", "sleep", "wake"), "sleeping"),
}


def __getattr__(name: str) -> object:
    """Public names load their module at first use, so that autoload costs nothing when off."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    home = _HOMES.get(name, "errors" if name.endswith("Error") else "runtime")
    value: object = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
