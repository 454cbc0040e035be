"""Telling umem what torch does, whichever device its tensors are on."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from .. import torch_build
from ..errors import ConfigError
from .attached import Parts

OBSERVERS = ("auto", "native", "python", "off")


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


def check(observer: str) -> None:
    """ConfigError where there is no such observer."""
    if observer not in OBSERVERS:
        raise ConfigError(f"there is no observer {observer!r}; allowed: {', '.join(OBSERVERS)}")


def start(parts: Parts, observer: str, ext: ModuleType | None) -> None:
    """Let `observer` tell umem about every op.

    Args:
        parts: gets what is put into torch.
        observer: "native" (in torch's dispatcher), "python" (slower), "off", or "auto": native
            where there is the extension, else python.
        ext: the extension, None where it cannot be had.
    """
    from . import torch_hooks

    if observer == "off":
        return
    if observer == "auto":
        observer = "native" if ext is not None else "python"
    native = observer == "native"
    if native:
        assert ext is not None
        parts.add(_NativeObserver(ext))
    else:
        parts.add(torch_hooks.PythonObserver())
    parts.add(torch_hooks.Tagger(step_boundaries=not native))


class _NativeObserver:
    def __init__(self, ext: ModuleType) -> None:
        self._ext = ext
        ext.install_observer()

    def remove(self) -> None:
        self._ext.remove_observer()
