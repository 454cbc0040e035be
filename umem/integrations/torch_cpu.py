"""torch on the software device: umem as the allocator of CPU tensors, and an op observer."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from . import torch_observer
from .attached import Attached, Parts

extension = torch_observer.extension

_parts = Parts()


def check(allocator: str) -> None:
    """Nothing can be in the way: torch's CPU allocator may be exchanged at any time."""
    del allocator


def attach(
    allocator: str = "auto", observer: str = "auto", cache_dir: Path | None = None
) -> Attached:
    """Make umem torch's CPU allocator, and let `observer` tell it about every op.

    Attached already, it changes the observer. The native runtime must have been started. On an
    error torch is left as it was.

    Args:
        allocator: ways into torch differ on a GPU only; there is one here.
        observer: "native" (in torch's dispatcher), "python" (slower), "off", or "auto": native.
        cache_dir: as for `extension`.

    Raises:
        ConfigError: unknown observer.
        NotSupportedError: the extension can neither be found nor built.
    """
    del allocator
    torch_observer.check(observer)
    ext = extension(cache_dir)

    def put() -> None:
        _parts.add(_Allocator(ext))
        torch_observer.start(_parts, observer, ext)

    _parts.replace(put)
    return Attached("soft", "cpu", "CPU tensors play the device's")


def detach() -> None:
    """Give torch its allocator back and stop observing; tensors of umem stay valid."""
    _parts.remove()


def is_attached() -> bool:
    """Whether umem is torch's CPU allocator."""
    return bool(_parts)


class _Allocator:
    def __init__(self, ext: ModuleType) -> None:
        self._ext = ext
        ext.install_allocator()

    def remove(self) -> None:
        self._ext.remove_allocator()
