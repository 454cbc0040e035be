"""umem without torch: memory for Buffers, CuPy and cuda.core alone."""

from __future__ import annotations

from pathlib import Path

from ..base.native import core
from .bindings import Attached


def check(allocator: str) -> None:
    """Accept any state: torch is not touched."""
    del allocator


def attach(allocator: str, observer: str, cache_dir: Path) -> Attached:
    """Describe the attachment; torch is left unchanged."""
    del observer, cache_dir
    return Attached(core.current_options().device, allocator, "torch keeps its own allocator")


def detach() -> None:
    """Do nothing: nothing was installed in torch."""
