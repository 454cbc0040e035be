"""torch on the software device: umem as the allocator of CPU tensors, and an op observer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from ..bindings import Attached, Bindings
from . import observer as torch_observer

extension = torch_observer.extension

_parts = Bindings()


def check(allocator: str) -> None:
    """Accept any state: torch's CPU allocator can be replaced at any time."""
    del allocator


def attach(
    allocator: str = "auto", observer: str = "auto", cache_dir: Path | None = None
) -> Attached:
    """Make umem torch's CPU allocator, and `observer` report every op to it.

    If umem is attached already, this replaces the observer. The native runtime must have been
    started. On an error torch is left unchanged.

    Args:
        allocator: ignored; there is a choice on GPUs only.
        observer: "native" (in torch's dispatcher), "python" (slower), "off", or "auto": native.
        cache_dir: as for `extension`.

    Raises:
        NotSupportedError: the extension can neither be found nor built.
    """
    del allocator
    ext = extension(cache_dir)

    def put() -> None:
        _parts.add(_Allocator(ext))
        torch_observer.start(_parts, observer, ext, "cpu")

    _parts.replace(put)
    seen_by = torch_observer.kind(observer, ext)
    return Attached("soft", "cpu", "CPU tensors represent the device's", seen_by)


def detach() -> None:
    """Restore torch's allocator and stop observing; tensors in umem's memory stay valid."""
    _parts.remove()


@contextlib.contextmanager
def host_memory() -> Iterator[None]:
    """Allocate CPU tensors in host memory on this thread, not in the software device's.

    Without effect while umem is not torch's CPU allocator.
    """
    ext = _Allocator.ext
    if ext is None:
        yield
        return
    before = ext.allocate_outside(True)
    try:
        yield
    finally:
        ext.allocate_outside(before)


class _Allocator:
    ext: ClassVar[ModuleType | None] = None  # while it is installed

    def __init__(self, ext: ModuleType) -> None:
        _Allocator.ext = self._ext = ext
        ext.install_allocator()

    def remove(self) -> None:
        self._ext.remove_allocator()
        _Allocator.ext = None
