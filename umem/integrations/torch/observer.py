"""Observers, which report torch's ops to umem, on any device."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from ..bindings import Bindings
from . import build


def extension(cache_dir: Path | None = None) -> ModuleType:
    """Return the C++ extension `_torch_ext`, built at the first use with a version of torch.

    Args:
        cache_dir: where a built extension is kept; None is `~/.cache/umem`.

    Raises:
        NotSupportedError: the extension can neither be found nor built.
    """
    from ...base.native import core  # loads libumem.so, which the extension joins

    del core
    return build.load(cache_dir)


def kind(observer: str, ext: ModuleType | None) -> str:
    """Return which observer `start` starts: "native", "python" or "off"."""
    if observer == "auto":
        return "native" if ext is not None else "python"
    return observer


def start(parts: Bindings, observer: str, ext: ModuleType | None, device: str) -> None:
    """Make `observer` report every op to umem.

    Args:
        parts: receives the parts that are installed in torch.
        observer: "native" (in torch's dispatcher), "python" (slower), "off", or "auto": native
            if the extension is available, else python.
        ext: the extension; None if it is not available.
        device: the type of umem's tensors: "cpu" or "cuda".
    """
    from . import compiled, custom_ops, forward_steps, hooks, list_ops, profiler_rows

    parts.add(profiler_rows.ProfilerRows())
    started = kind(observer, ext)
    if started == "off":
        return
    native = started == "native"
    if native:
        assert ext is not None
        parts.add(_NativeObserver(ext))
        parts.add(compiled.CompiledKernels(ext))
        parts.add(custom_ops.CustomOps())
    parts.add(hooks.Tagger(step_boundaries=not native))
    parts.add(forward_steps.ForwardSteps())
    parts.add(list_ops.ListOps(device))
    if not native:
        parts.add(hooks.PythonObserver())  # removed first: if it cannot be, all parts remain


class _NativeObserver:
    def __init__(self, ext: ModuleType) -> None:
        self._ext = ext
        ext.install_observer()

    def remove(self) -> None:
        self._ext.remove_observer()
