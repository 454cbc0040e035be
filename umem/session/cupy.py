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
        ConfigError: an option that is for torch: optimizer or recompute.
        NotSupportedError: CuPy cannot be imported, or there is no GPU.
        StateError: umem is on with other options, or this is called inside `using_allocator`.
    """
    from ..config.settings import load
    from ..errors import ConfigError
    from ..integrations import cupy
    from . import session

    for name in ("optimizer", "recompute"):
        if name in options:
            raise ConfigError(
                f"umem.cupy.enable({name}={options[name]!r}) would turn umem on without torch, for "
                f"which the option is; call umem.enable({name}=...) first, then umem.cupy.enable()"
            )
    was_on = session.is_enabled()
    if options or not was_on:
        session.start(load({"allocator": "none", "device": "cuda", **options}))
    try:
        cupy.install()
    except BaseException:
        if not was_on:  # umem was turned on for CuPy only
            session.disable()
        raise
