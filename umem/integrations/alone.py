"""umem without torch: memory for Buffers, CuPy and cuda.core alone."""

from __future__ import annotations

from pathlib import Path

from ..native import core
from .attached import Attached


def check(allocator: str) -> None:
    """Nothing can be in the way."""
    del allocator


def attach(allocator: str, observer: str, cache_dir: Path) -> Attached:
    """torch, where it is installed, stays as it is."""
    del observer, cache_dir
    return Attached(core.current_options().device, allocator, "torch keeps its own allocator")


def detach() -> None:
    """There is nothing in torch."""
