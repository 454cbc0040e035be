"""What is checked and worked out before umem turns on: torch, the device, the budget."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from typing import TYPE_CHECKING

from . import config, machine
from .config import Settings
from .errors import NotSupportedError
from .options import BY_NAME
from .units import format_bytes
from .values import PAGE_BYTES

if TYPE_CHECKING:
    from . import _core

LEAST_TORCH = (2, 11)
PLANNED = "planned"  # the native policy that runs plans


def device_kind(settings: Settings) -> str:
    """What the option `device` means here: "cuda" or "soft".

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
        from .native import core

        probe = core.probe_cuda()
        return "" if probe["devices"] else str(probe["reason"])
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return "" if torch.cuda.device_count() else "torch sees no GPU"


def native_options(settings: Settings, threads: int) -> _core.Options:
    """What the native side is told, with everything checked that needs no torch.

    Args:
        threads: compute threads that the budget of a software device has to do for.

    Raises:
        ConfigError: unknown policy or profile, or a budget that does not fit the device.
        NotSupportedError: a GPU was asked for, and there is none.
    """
    from .native import core
    from .policies import registry

    _check_name(settings, "policy", settings.policy, list(registry.names()))
    if settings.allocator == "none" and settings.recompute != "off":
        reason = f"{settings.recompute!r} is for torch's modules, and allocator=none leaves them"
        raise config.refusal(BY_NAME["recompute"], settings.origins["recompute"], reason, "off")
    options = core.Options()
    options.device = device_kind(settings)
    if options.device == "soft":
        _soft_options(settings, threads, options)
    else:
        _cuda_options(settings, options)
    options.min_swap_bytes = settings.min_swap
    # The native side knows those that need no plan; one of its own runs the plans of all others.
    options.policy = settings.policy if settings.policy in core.policies() else PLANNED
    options.guard = settings.guard
    return options


def _soft_options(settings: Settings, threads: int, options: _core.Options) -> None:
    from .native import core

    if settings.device.profile is not None:
        profiles = [profile["name"] for profile in core.profiles()]
        _check_name(settings, "device", settings.device.profile, profiles)
        options.profile = settings.device.profile
    options.device_bytes = settings.device.bytes or 0
    options.budget_bytes = budget_bytes(settings, threads)
    options.host_budget_bytes = host_budget_bytes(settings, options.budget_bytes)
    options.floor_bytes = config.floor_bytes(threads)


def _cuda_options(settings: Settings, options: _core.Options) -> None:
    """A share of the device's memory, and `auto`, are found at the device's first use."""
    options.floor_bytes = config.floor_bytes(1)
    options.budget_bytes = cuda_budget_bytes(settings)
    options.budget_percent = settings.budget.percent or 0
    options.host_budget_bytes = host_budget_bytes(settings, 0)


def cuda_budget_bytes(settings: Settings) -> int:
    """The budget of each GPU in bytes; 0 where it is found at the device's first use.

    Raises:
        ConfigError: below the floor.
    """
    count = settings.budget.bytes
    if count is not None and count < config.floor_bytes(1):
        least = format_bytes(config.floor_bytes(1))
        raise config.refusal(
            BY_NAME["budget"],
            settings.origins["budget"],
            f"{format_bytes(count)} is below the floor of {least}",
            f"{least} and up",
        )
    return count or 0


def budget_bytes(settings: Settings, threads: int) -> int:
    """The budget of a software device in bytes.

    Raises:
        ConfigError: as `config.resolve_budget`, or more than this machine has.
    """
    available = machine.available_memory()
    count = config.resolve_budget(settings, available=available, threads=threads)
    total = machine.total_memory()
    if total is not None and count > total:
        reason = (
            f"{format_bytes(count)} of frames, on a machine with {format_bytes(total)} of memory"
        )
        raise config.refusal(
            BY_NAME["budget"], settings.origins["budget"], reason, "less than the memory"
        )
    return count


def host_budget_bytes(settings: Settings, budget: int) -> int:
    """The host budget in bytes, 0 for none, beside frames of `budget` bytes on this machine."""
    if settings.host_budget is not None:
        return settings.host_budget
    available = machine.available_memory()
    if available is None:
        return 0
    # The frames of a software device and the host store share this machine's memory.
    return max(available * 9 // 10 - budget, PAGE_BYTES)


def _check_name(settings: Settings, name: str, value: str, known: list[str]) -> None:
    if value not in known:
        from .values import did_you_mean

        reason = f"there is no {value!r}{did_you_mean(value, known)}"
        raise config.refusal(BY_NAME[name], settings.origins[name], reason, ", ".join(known))


def torch_problem(version: str | None) -> str | None:
    """Why this version of torch (None: not installed) cannot be used; None where it can."""
    least = ".".join(map(str, LEAST_TORCH))
    if version is None:
        return f"torch is not installed; install it with `pip install 'torch>={least}'`"
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < LEAST_TORCH:
        return f"torch {version} is older than {least}; run `pip install 'torch>={least}'`"
    return None


def require_torch() -> None:
    """NotSupportedError unless torch can be used; imports it."""
    # During autoload torch is half imported and already in sys.modules, which is enough.
    version: str | None = None
    try:
        if "torch" in sys.modules or importlib.util.find_spec("torch") is not None:
            import torch

            version = str(torch.__version__)
    except ModuleNotFoundError as error:  # something keeps it from being found
        if error.name != "torch":
            raise
    problem = torch_problem(version)
    if version is None:
        problem = f'{problem}; CuPy, cuda.core and umem.Buffer do without: allocator="none"'
    if problem is not None:
        raise NotSupportedError(problem)


def torch_threads() -> int:
    """Threads that torch computes one operator with."""
    import torch

    return int(torch.get_num_threads())


def set_up_log(level: str) -> None:
    """Let umem's messages from `level` on reach stderr, where the program says nothing else."""
    log = logging.getLogger("umem")
    log.setLevel(level.upper())
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("umem: %(message)s"))
        log.addHandler(handler)
