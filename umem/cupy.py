"""CuPy in umem's memory: `umem.cupy.enable()`."""

from __future__ import annotations

from typing import Any

from .integrations.cupy import malloc
from .integrations.cupy import remove as disable

__all__ = ["disable", "enable", "malloc"]


def enable(**options: Any) -> None:
    """Let CuPy allocate from umem from now on; its other arrays stay where they are.

    umem is turned on where it is off, without torch: `umem.enable(allocator="none",
    device="cuda", **options)`. With torch, call `umem.enable()` first. `umem.disable()` gives CuPy
    its allocator back, and so does `umem.cupy.disable()`, which leaves umem on.

    Raises:
        As `umem.enable`; NotSupportedError: CuPy cannot be imported, or there is no GPU;
        StateError: umem is on with other options, or the call is inside of `using_allocator`.
    """
    from . import runtime
    from .integrations import cupy

    was_on = runtime.is_enabled()
    if options or not was_on:
        runtime.enable(**{"allocator": "none", "device": "cuda", **options})
    try:
        cupy.install()
    except BaseException:
        if not was_on:  # umem without CuPy is not what was asked for
            runtime.disable()
        raise
