"""Policies: which tensors leave the device and when they return. See docs/policies.md.

The public names are loaded on use, because the names of policies alone need no numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile as DeviceProfile
    from ..trace.step_trace import Kind as Kind
    from ..trace.step_trace import StepTrace as StepTrace
    from .base import Candidate as Candidate
    from .base import CandidateView as CandidateView
    from .base import Fetch as Fetch
    from .base import Move as Move
    from .base import Plan as Plan
    from .base import Policy as Policy
    from .base import WriteBack as WriteBack
    from .default.occupancy import capacity as capacity
    from .plan_check import check as check
    from .registry import names as names

_HOMES = {
    **dict.fromkeys(("Policy", "Plan", "Move", "Fetch", "WriteBack"), "base"),
    **dict.fromkeys(("StepTrace", "Kind", "DeviceProfile", "Candidate", "CandidateView"), "base"),
    "capacity": "default.occupancy",
    "check": "plan_check",
    "names": "registry",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605 - one table, not two


def __getattr__(name: str) -> object:
    """Load a public name's module at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
