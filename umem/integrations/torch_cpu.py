"""torch on the software device: umem as the allocator of CPU tensors, and an op observer."""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType
from typing import Protocol

from .. import torch_build
from ..errors import ConfigError

OBSERVERS = ("auto", "native", "python", "off")


class _Part(Protocol):
    def remove(self) -> None: ...


_lock = threading.RLock()
_parts: list[_Part] = []  # in the order of attaching


def extension(cache_dir: Path | None = None) -> ModuleType:
    """The C++ extension `_torch_ext`; built at its first use for a torch.

    Args:
        cache_dir: where a built extension is kept; None is `~/.cache/umem`.

    Raises:
        NotSupportedError: it can neither be found nor built.
    """
    from ..native import core  # loads libumem.so, which the extension joins

    del core
    return torch_build.load(cache_dir)


def attach(observer: str = "auto", cache_dir: Path | None = None) -> None:
    """Make umem torch's CPU allocator, and let `observer` tell it about every op.

    Attached already, it changes the observer. The native runtime must have been started. On an
    error torch is left as it was.

    Args:
        observer: "native" (in torch's dispatcher), "python" (slower), "off", or "auto": native.
        cache_dir: as for `extension`.

    Raises:
        ConfigError: unknown observer.
        NotSupportedError: the extension can neither be found nor built.
    """
    if observer not in OBSERVERS:
        raise ConfigError(f"there is no observer {observer!r}; allowed: {', '.join(OBSERVERS)}")
    with _lock:
        ext = extension(cache_dir)
        detach()
        try:
            _start(_Allocator(ext))
            if observer != "off":
                _start_observer(ext, observer)
        except BaseException:
            detach()
            raise


def detach() -> None:
    """Give torch its allocator back and stop observing; tensors of umem stay valid."""
    with _lock:
        while _parts:
            _parts[-1].remove()  # where it cannot be removed now, it stays in the list
            _parts.pop()


def is_attached() -> bool:
    """Whether umem is torch's CPU allocator."""
    return bool(_parts)


def _start(part: _Part) -> None:
    _parts.append(part)


def _start_observer(ext: ModuleType, observer: str) -> None:
    from . import torch_hooks

    native = observer != "python"
    _start(_NativeObserver(ext) if native else torch_hooks.PythonObserver(ext.family_of))
    _start(torch_hooks.Tagger(step_boundaries=not native))


class _Allocator:
    def __init__(self, ext: ModuleType) -> None:
        self._ext = ext
        ext.install_allocator()

    def remove(self) -> None:
        self._ext.remove_allocator()


class _NativeObserver:
    def __init__(self, ext: ModuleType) -> None:
        self._ext = ext
        ext.install_observer()

    def remove(self) -> None:
        self._ext.remove_observer()
