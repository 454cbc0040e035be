"""Checks the settings on this machine and resolves them: device, budget, policy."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ..base import device_profiles, host
from ..base.scratch_file import open_unnamed
from ..base.units import FLOOR_PAGES, PAGE_BYTES, format_bytes, staging_bytes
from ..config import ranks
from ..config.settings import Settings
from ..errors import ConfigError, NotSupportedError, did_you_mean

if TYPE_CHECKING:
    from ..base.native import core
    from ..policies.base import Policy

PLANNED = "planned"  # the native policy that runs plans
_SHARE_WITH_DISK = 0.8  # of the available memory: evicted bytes take none of it
# The kernel's mappings that a page may need (docs/decisions/0001-frames-are-private-memory.md).
_MAPPINGS_OF_A_PAGE = 3
_MAPPINGS_OF_OTHERS = 4090  # libraries, and files that the program maps


def device_kind(settings: Settings) -> str:
    """Resolve the option `device` to "cuda" or "soft".

    An imported torch answers, because umem needs a GPU that torch can use, and because torch counts
    GPUs without starting CUDA (a process that started CUDA cannot fork). Without torch the driver
    answers.

    Raises:
        NotSupportedError: a GPU was requested, and there is none.
    """
    kind = settings.device.kind
    if kind == "soft":
        return kind
    problem = why_no_gpu()
    if problem and kind == "cuda":
        raise NotSupportedError(
            f"{settings.origins['device']}: {problem}; allowed here: soft, which is for torch's "
            "CPU tensors and umem.Buffer"
        )
    return "soft" if problem else "cuda"


def why_no_gpu() -> str:
    """Return why torch has no GPU to compute on; empty if it has one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is None:
        return "this torch is built without CUDA"
    if torch is not None and torch.cuda.device_count():
        return ""
    from ..base.native import core

    probe = core.probe_cuda()
    if not probe["devices"]:
        return str(probe["reason"])
    return "" if torch is None else "torch sees no GPU"


def native_options(settings: Settings, threads: int) -> core.Options:
    """Check the settings as far as that needs no torch, and return the native options.

    Args:
        settings: the options of the user.
        threads: compute threads of the software device; its minimum budget grows with them.

    Raises:
        ConfigError: unknown policy or profile, or a budget that does not fit the device.
        NotSupportedError: a GPU was requested, and there is none.
    """
    from ..base.native import core

    _check_policy(settings)
    if settings.allocator == "none":
        _check_without_torch(settings)
    options = core.Options()
    options.device = device_kind(settings)
    _check_device(settings, options.device)
    if options.device == "soft" and settings.device.profile is not None:
        options.profile = settings.device.profile
    elif settings.disk is not None and options.device == "soft":
        options.profile = device_profiles.DISK
    options.device_bytes = settings.device.bytes or 0
    options.budget_bytes, options.host_budget_bytes = budgets(settings, options.device, threads)
    if settings.disk is not None and options.device == "soft":
        options.disk = str(settings.disk.folder)
        options.disk_bytes = settings.disk.bytes or 0
        options.disk_bytes_a_day = settings.disk_writes
        options.staging_bytes = staging_bytes(options.budget_bytes)
        options.budget_bytes -= options.staging_bytes
        options.device_bytes -= min(options.staging_bytes, options.device_bytes)
    if options.device == "cuda":
        options.budget_percent = settings.budget.percent or 0
    options.floor_bytes = floor_bytes(threads if options.device == "soft" else 1)
    options.min_swap_bytes = settings.min_swap
    # Native code runs some policies itself; `planned` runs the plans of all others.
    options.policy = str(settings.policy) if is_native(settings.policy) else PLANNED
    options.guard = settings.guard
    options.backing = settings.backing
    options.watchdog_s = settings.watchdog
    return options


def is_native(policy: object) -> bool:
    """Return whether native code runs this policy without plans."""
    from ..base.native import core

    return isinstance(policy, str) and policy in core.policies()


def check_disk(settings: Settings) -> None:
    """Refuse a folder, if there is one, that cannot hold a scratch file.

    Raises:
        ConfigError: it cannot.
    """
    if settings.disk is None:
        return
    try:
        for descriptor in open_unnamed(settings.disk.folder):
            os.close(descriptor)
    except OSError as error:
        reason = error.strerror or str(error)
        raise settings.refusal("disk", reason, "a folder on a disk") from error


def planning_policy(policy: object, origin: str) -> Policy | None:
    """Make the policy that plans; None if native code decides without plans.

    Args:
        policy: the value of the option `policy`.
        origin: where the value comes from, for messages.

    Raises:
        ConfigError: there is no such policy, or it fails to load.
    """
    if is_native(policy):
        return None
    from ..policies import registry

    try:
        return registry.make(policy)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error


def budgets(settings: Settings, device: str, threads: int) -> tuple[int, int]:
    """Return the budget of each device and the host budget, in bytes.

    A device budget of 0 is found at the first use of the GPU. A host budget of 0 is unlimited.

    Raises:
        ConfigError: a budget below the minimum, or more than the device or this machine has.
    """
    available = _available()
    if device == "soft":
        count = frames = soft_budget(settings, available=available, threads=threads)
    else:
        count, frames = _cuda_budget(settings), 0
    if settings.host_budget is not None:
        return count, settings.host_budget
    if settings.disk is not None and device == "soft":
        return count, settings.disk.bytes or 0
    if available is None:
        return count, 0
    # The frames of a software device and the evicted bytes share this machine's memory.
    return count, max(host.for_evicted(available) - frames, PAGE_BYTES)


def soft_budget(settings: Settings, *, available: int | None, threads: int) -> int:
    """Return the budget of the software device in bytes.

    Raises:
        ConfigError: the budget is below the minimum, above the device or above this machine's
            memory, or needs more mappings than the kernel allows; a share of a device of unknown
            size; or `auto`, and `available` (bytes of free memory) is unknown.
    """
    budget, size, mappings = settings.budget, settings.device.bytes, host.max_mappings()
    most = None if mappings is None else _bytes_within(mappings)
    if budget.bytes is not None:
        count = budget.bytes
    elif budget.percent is not None:
        if size is None:
            reason = f"{budget} is a share of a software device without a size"
            allowed = "a size in UMEM_DEVICE=soft:64MiB, or bytes here"
            raise settings.refusal("budget", reason, allowed)
        count = int(size * budget.percent / 100)
    elif size is not None:
        count = size
    elif available is not None:
        share = _SHARE_WITH_DISK if settings.disk is not None else 0.5
        count = int(available * share) // PAGE_BYTES * PAGE_BYTES
        count = count if most is None else min(count, most)
    else:
        reason = "auto cannot find out how much memory is available"
        raise settings.refusal("budget", reason, "bytes as 8GiB")
    _check_size(settings, count)
    staging = staging_bytes(count) if settings.disk is not None else 0
    if count - staging < floor_bytes(threads):
        reason = _below_floor(count - staging, threads)
        least = f"at least {format_bytes(floor_bytes(threads) + staging)}"
        raise settings.refusal("budget", reason, least)
    total = host.total_memory()
    if total is not None and count > total:
        reason = (
            f"{format_bytes(count)} is more than this machine's memory of {format_bytes(total)}"
        )
        raise settings.refusal("budget", reason, "less than the memory")
    if most is not None and count > most:
        needed = -(-count // PAGE_BYTES) * _MAPPINGS_OF_A_PAGE + _MAPPINGS_OF_OTHERS
        raise settings.refusal(
            "budget",
            f"{format_bytes(count)} may need {needed} mappings of memory, and the kernel allows a "
            f"process {mappings}",
            f"up to {format_bytes(most)}, or more after sysctl -w vm.max_map_count={needed}",
        )
    return count


def _bytes_within(mappings: int) -> int:
    """Return the largest budget of a software device for which so many mappings suffice."""
    return max(mappings - _MAPPINGS_OF_OTHERS, 0) // _MAPPINGS_OF_A_PAGE * PAGE_BYTES


def floor_bytes(threads: int) -> int:
    """Return the minimum budget with `threads` compute threads, in bytes."""
    return FLOOR_PAGES * PAGE_BYTES * threads


def _cuda_budget(settings: Settings) -> int:
    """Return the budget of each GPU in bytes; 0 if it is resolved at the device's first use."""
    count = settings.budget.bytes
    if count is not None and count < floor_bytes(1):
        least = format_bytes(floor_bytes(1))
        reason = f"{format_bytes(count)} is below the floor of {least}"
        raise settings.refusal("budget", reason, f"{least} and up")
    _check_size(settings, count or 0)
    return count or 0


def _check_size(settings: Settings, count: int) -> None:
    """Refuse a budget above the size of the device, if that has one."""
    size = settings.device.bytes
    if size is not None and count > size:
        reason = f"{format_bytes(count)} is more than the device's {format_bytes(size)}"
        raise settings.refusal("budget", reason, "up to the device's size")


def _below_floor(count: int, threads: int) -> str:
    return (
        f"{format_bytes(count)} is below the floor of {format_bytes(floor_bytes(threads))}, "
        f"which is {FLOOR_PAGES} pages of {format_bytes(PAGE_BYTES)} for each of {threads} torch "
        "thread(s): one instruction can need several pages at once, and with fewer no thread would "
        "make progress (OMP_NUM_THREADS sets the threads)"
    )


def _available() -> int | None:
    """Return the bytes of this machine that are available to this rank; None if not known.

    The ranks of a host start together, and share it equally. A device that live tensors keep
    open holds memory that is this rank's already.
    """
    found, mine = host.available_memory(), ranks.rank()
    if found is None:
        return None
    return (found if mine is None else found // mine.local_world) + _held()


def _held() -> int:
    """Return the bytes of this machine's memory that umem's open devices hold."""
    from ..base.native import core

    if not core.opened_devices():
        return 0
    figures, options = core.stats(), core.current_options()
    held = 0 if options.disk else figures["host_bytes"]
    return held + (figures["resident_bytes"] if options.device == "soft" else 0)


def _check_policy(settings: Settings) -> None:
    """Refuse an unknown policy name; code at a place is loaded when the session starts."""
    from ..policies import registry

    spec, known = settings.policy, registry.names()
    if isinstance(spec, str) and ":" not in spec and spec not in known:
        reason = f"there is no {spec!r}{did_you_mean(spec, known)}"
        raise settings.refusal("policy", reason, registry.listed(known))


def _check_without_torch(settings: Settings) -> None:
    """Refuse options that act on torch's objects."""
    if settings.recompute != "off":
        reason = f"{settings.recompute!r} needs torch, which allocator=none does not serve"
        raise settings.refusal("recompute", reason, "off")
    if settings.optimizer.value != 0:
        reason = f"'{settings.optimizer}' needs torch, which allocator=none does not serve"
        raise settings.refusal("optimizer", reason, "device")


def _check_device(settings: Settings, kind: str) -> None:
    """Refuse an unknown profile, and a smaller GPU under the guard."""
    from ..base.native import core

    wanted = settings.device
    if kind == "soft" and wanted.profile is not None:
        known = [profile["name"] for profile in core.profiles()]
        if wanted.profile not in known:
            reason = f"there is no {wanted.profile!r}{did_you_mean(wanted.profile, known)}"
            raise settings.refusal("device", reason, ", ".join(known))
    if kind == "soft" and settings.backing != "managed":
        reason = "'mapped' is memory of a GPU, and the device is the software device"
        raise settings.refusal("backing", reason, "managed, or device=cuda")
    if settings.disk_writes and (kind == "cuda" or settings.disk is None):
        reason = "no evicted memory is written to a disk"
        allowed = "unlimited, or with device=soft and a disk"
        raise settings.refusal("disk_writes", reason, allowed)
    if kind == "cuda":
        check_disk(settings)
    if settings.backing == "mapped" and settings.allocator == "pool":
        reason = "torch hands the blocks of a pool out again without telling umem"
        raise settings.refusal("backing", reason, "managed, or another allocator than pool")
    if settings.backing == "mapped" and settings.observer in ("python", "off"):
        reason = f"with observer={settings.observer}, the streams of operators are not known"
        raise settings.refusal("backing", reason, "managed, or observer=native")
    if kind == "cuda" and wanted.bytes is not None and settings.guard:
        reason = "a smaller GPU is made by holding the rest of its memory, which the guard forbids"
        raise settings.refusal("device", reason, "cuda, or guard=off")
