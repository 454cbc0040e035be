"""Settings resolved for this machine before umem turns on: device, budget, policy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..base import host
from ..base.units import PAGE_BYTES, format_bytes
from ..config import ranks
from ..config.options import BY_NAME
from ..config.settings import Settings, floor_bytes, refusal, resolve_budget
from ..errors import ConfigError, NotSupportedError, did_you_mean

if TYPE_CHECKING:
    from ..base.native import core
    from ..policies.base import Policy

PLANNED = "planned"  # the native policy that runs plans


def device_kind(settings: Settings) -> str:
    """Resolve the option `device` to "cuda" or "soft".

    Asks torch where it is imported, because what counts is what torch can use, and because torch
    counts GPUs without starting CUDA, after which a process could not fork; else the driver.

    Raises:
        NotSupportedError: a GPU was asked for, and there is none.
    """
    kind = settings.device.kind
    if kind == "soft":
        return kind
    problem = why_no_gpu()
    if problem and kind == "cuda":
        raise NotSupportedError(
            f"{settings.origins['device']}: {problem}; use UMEM_DEVICE=soft, which is for torch's "
            "tensors and umem.Buffer"
        )
    return "soft" if problem else "cuda"


def why_no_gpu() -> str:
    """Why torch has no GPU to compute on; empty where it has one."""
    torch = sys.modules.get("torch")
    if torch is None:
        from ..base.native import core

        probe = core.probe_cuda()
        return "" if probe["devices"] else str(probe["reason"])
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return "" if torch.cuda.device_count() else "torch sees no GPU"


def native_options(settings: Settings, threads: int) -> core.Options:
    """Check the settings as far as that needs no torch, and make the native options.

    Args:
        threads: compute threads that the budget of a software device has to do for.

    Raises:
        ConfigError: unknown policy or profile, or a budget that does not fit the device.
        NotSupportedError: a GPU was asked for, and there is none.
    """
    from ..base.native import core

    _check_policy(settings)
    if settings.allocator == "none" and settings.recompute != "off":
        reason = f"{settings.recompute!r} is for torch's modules, and allocator=none leaves them"
        raise refusal(BY_NAME["recompute"], settings.origins["recompute"], reason, "off")
    if settings.allocator == "none" and settings.optimizer.value != 0:
        reason = f"'{settings.optimizer}' is for torch's optimizers, and allocator=none leaves them"
        raise refusal(BY_NAME["optimizer"], settings.origins["optimizer"], reason, "device")
    options = core.Options()
    options.device = device_kind(settings)
    if options.device == "soft":
        _soft_options(settings, threads, options)
    else:
        _cuda_options(settings, options)
    options.min_swap_bytes = settings.min_swap
    # Native code runs some policies by itself, and the plans of all others by one of its own.
    native = native_policy(settings)
    options.policy = native if native is not None else PLANNED
    options.guard = settings.guard
    options.watchdog_s = settings.watchdog
    return options


def native_policy(settings: Settings) -> str | None:
    """Return the policy's name if native code runs it without plans; else None."""
    from ..base.native import core

    known: list[str] = core.policies()
    return (
        settings.policy if isinstance(settings.policy, str) and settings.policy in known else None
    )


def planning_policy(settings: Settings) -> Policy | None:
    """Make the policy that plans; None where native code decides without plans.

    Raises:
        ConfigError: there is no such policy, or it fails to load.
    """
    if native_policy(settings) is not None:
        return None
    from ..policies import registry

    try:
        return registry.make(settings.policy)
    except ConfigError as error:
        raise ConfigError(f"{settings.origins['policy']}: {error}") from error


def _check_policy(settings: Settings) -> None:
    """ConfigError for a name that no policy has; what a place names is loaded with the session."""
    from ..policies import registry

    spec, known = settings.policy, registry.names()
    if isinstance(spec, str) and ":" not in spec and spec not in known:
        reason = f"there is no {spec!r}{did_you_mean(spec, known)}"
        origin = settings.origins["policy"]
        raise refusal(BY_NAME["policy"], origin, reason, registry.listed(known))


def _soft_options(settings: Settings, threads: int, options: core.Options) -> None:
    from ..base.native import core

    if settings.device.profile is not None:
        profiles = [profile["name"] for profile in core.profiles()]
        _check_name(settings, "device", settings.device.profile, profiles)
        options.profile = settings.device.profile
    options.device_bytes = settings.device.bytes or 0
    options.budget_bytes = budget_bytes(settings, threads)
    options.host_budget_bytes = host_budget_bytes(settings, options.budget_bytes)
    options.floor_bytes = floor_bytes(threads)


def _cuda_options(settings: Settings, options: core.Options) -> None:
    """Fill in the budget; a percentage and `auto` are resolved at the device's first use."""
    if settings.device.bytes is not None and settings.guard:
        reason = "a smaller GPU is made by holding the rest of its memory, which the guard forbids"
        raise refusal(BY_NAME["device"], settings.origins["device"], reason, "cuda, or guard=off")
    options.device_bytes = settings.device.bytes or 0
    options.floor_bytes = floor_bytes(1)
    options.budget_bytes = cuda_budget_bytes(settings)
    options.budget_percent = settings.budget.percent or 0
    options.host_budget_bytes = host_budget_bytes(settings, 0)


def cuda_budget_bytes(settings: Settings) -> int:
    """Return the budget of each GPU in bytes; 0 if it is resolved at the device's first use.

    Raises:
        ConfigError: below the floor.
    """
    count = settings.budget.bytes
    if count is not None and count < floor_bytes(1):
        least = format_bytes(floor_bytes(1))
        raise refusal(
            BY_NAME["budget"],
            settings.origins["budget"],
            f"{format_bytes(count)} is below the floor of {least}",
            f"{least} and up",
        )
    return count or 0


def budget_bytes(settings: Settings, threads: int) -> int:
    """Return the budget of a software device in bytes.

    Raises:
        ConfigError: as `config.resolve_budget`, or more than this machine has.
    """
    available = _available()
    count = resolve_budget(settings, available=available, threads=threads)
    total = host.total_memory()
    if total is not None and count > total:
        reason = (
            f"{format_bytes(count)} of frames, on a machine with {format_bytes(total)} of memory"
        )
        raise refusal(BY_NAME["budget"], settings.origins["budget"], reason, "less than the memory")
    return count


def host_budget_bytes(settings: Settings, budget: int) -> int:
    """Return the host budget in bytes, 0 for none, next to frames of `budget` bytes."""
    if settings.host_budget is not None:
        return settings.host_budget
    available = _available()
    if available is None:
        return 0
    # The frames of a software device and the host store share this machine's memory.
    return max(host.for_evicted(available) - budget, PAGE_BYTES)


def _available() -> int | None:
    """Return the bytes of this machine that are available to this rank; None if not known.

    The ranks of a host start together, and share it equally.
    """
    found, mine = host.available_memory(), ranks.rank()
    return found if found is None or mine is None else found // mine.local_world


def _check_name(settings: Settings, name: str, value: str, known: list[str]) -> None:
    if value not in known:
        reason = f"there is no {value!r}{did_you_mean(value, known)}"
        raise refusal(BY_NAME[name], settings.origins[name], reason, ", ".join(known))
