"""The namespace `umem.cupy`: CuPy arrays in umem's memory."""

from __future__ import annotations

from typing import Any

from ..integrations.cupy import malloc
from ..integrations.cupy import remove as disable

__all__ = ["disable", "enable", "malloc"]


def enable(**options: Any) -> None:
    """Make CuPy allocate from umem; existing arrays stay where they are.

    If umem is off, this turns it on without torch: `umem.enable(allocator="none", device="cuda",
    **options)`. To use torch as well, call `umem.enable()` first. `umem.disable()` restores CuPy's
    allocator, and so does `umem.cupy.disable()`, which leaves umem on.

    Raises:
        UmemError: as in `umem.enable`.
        ConfigError: the option optimizer, which is for torch.
        NotSupportedError: CuPy cannot be imported, or there is no GPU.
        StateError: umem is on with other options, or this is called inside `using_allocator`.
    """
    from ..config.settings import load
    from ..errors import ConfigError
    from ..integrations import cupy
    from . import session

    was_on = session.is_enabled()
    if options or not was_on:
        settings = load({"allocator": "none", "device": "cuda", **options})
        if not was_on and settings.optimizer.value != 0:
            raise ConfigError(
                f"{settings.origins['optimizer']}: umem.cupy.enable() turns umem on without torch, "
                "for which the option optimizer is; call umem.enable() first"
            )
        session.start(settings)
    try:
        cupy.install()
    except BaseException:
        if not was_on:  # umem was turned on for CuPy only
            session.disable()
        raise
