"""torch on GPUs: umem as the allocator of CUDA tensors, and an op observer.

There are three kinds. `subclass`, in the torch extension, replaces torch's allocator and keeps all
of its functions. `pluggable` passes C functions of libumem.so to torch: it needs no extension, but
torch then has no statistics, snapshots or graphs. `pool` uses the same functions for a
`torch.cuda.MemPool`, for a part of a program; it is the only one that can start after CUDA was
initialised. Allocations on other threads, such as those of backward passes, are not routed to the
pool.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...base.native import core
from ...errors import NotSupportedError, StateError
from ..bindings import Attached, Bindings
from . import build
from . import observer as torch_observer

_TOO_LATE = (
    "CUDA is already initialised with torch's own allocator: call umem.enable() before the first "
    "CUDA call of the program, or use UMEM_ALLOCATOR=pool, which serves a part of it"
)

_parts = Bindings()
# The kind of allocator that torch keeps for good once CUDA is initialised; None while torch's own
# allocator can be restored, or was never replaced.
_kept: str | None = None
_functions: Any = None  # the torch.cuda.memory.CUDAPluggableAllocator of libumem.so's


def check(allocator: str) -> None:
    """Check that `attach` can work, before anything is started.

    Raises:
        NotSupportedError: this torch is built without CUDA.
        StateError: CUDA is initialised, so the allocator can no longer be replaced, another
            library replaced torch's allocator, or a CUDA graph is being captured.
    """
    if torch.version.cuda is None:
        raise NotSupportedError(
            f"torch {torch.__version__} is built without CUDA; install a CUDA build, or use "
            "UMEM_DEVICE=soft"
        )
    if allocator != "pool" and _kept is None:
        _check_backend(torch.cuda.memory.get_allocator_backend())
    if not _initialized():
        return
    if torch.cuda.is_current_stream_capturing():
        raise StateError("a CUDA graph is being captured; call umem.enable() before or after it")
    if allocator == "pool":
        return
    if _kept is None:
        raise StateError(_TOO_LATE)
    if allocator not in ("auto", _kept):
        raise StateError(
            f"CUDA was initialised with umem's allocator {_kept!r}, which torch keeps; to use "
            f"{allocator!r}, start a new process"
        )


def _check_backend(backend: str) -> None:
    if backend == "cudaMallocAsync":
        raise StateError(
            "PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF has backend:cudaMallocAsync, with which "
            "torch accepts no other allocator; remove that setting"
        )
    if backend != "native":
        raise StateError(
            f"torch's CUDA allocator was replaced already, by {backend!r}; do not install that "
            "one, or use UMEM_ALLOCATOR=pool"
        )


def attach(
    allocator: str = "auto", observer: str = "auto", cache_dir: Path | None = None
) -> Attached:
    """Make umem torch's CUDA allocator, and `observer` report every op to it.

    The native runtime must have been started. On an error torch is left unchanged.

    Args:
        allocator: "subclass", "pluggable", "pool", or "auto": subclass where the extension has it,
            else pluggable.
        observer: as for `torch_observer.start`.
        cache_dir: as for `torch_observer.extension`.

    Raises:
        UmemError: as in `check`.
        NotSupportedError: the extension can neither be found nor built, and the requested allocator
            or observer needs it.
    """
    check(allocator)
    ext, problem = _find_extension(cache_dir)
    kind, why = _choose(allocator, ext, problem)
    blind = observer == "auto" and core.current_options().backing == "mapped"  # without streams
    if ext is None and (kind == "subclass" or observer == "native" or blind):
        raise NotSupportedError(problem)
    pool: Any = None

    def put() -> None:
        nonlocal pool
        if kind == "subclass":
            assert ext is not None
            _parts.add(_Subclass(ext))
        elif kind == "pluggable":
            _parts.add(_Pluggable())
        else:
            pool = _make_pool()  # it ends with the last reference to it
        torch_observer.start(_parts, observer, ext, "cuda")

    _parts.replace(put)
    return Attached("cuda", kind, why, torch_observer.kind(observer, ext), pool)


def detach() -> None:
    """Stop observing, and restore torch's allocator where torch allows it.

    Tensors stay valid. After `pluggable` torch keeps calling umem, which then returns plain device
    memory.
    """
    _parts.remove()


def _find_extension(cache_dir: Path | None) -> tuple[ModuleType | None, str]:
    """Return the extension, and the reason why it cannot be the allocator, or ""."""
    try:
        ext = torch_observer.extension(cache_dir)
    except NotSupportedError as error:
        return None, str(error)
    if ext.with_cuda:
        return ext, ""
    return ext, build.cuda_problem() or "the torch extension was built without CUDA"


def _choose(allocator: str, ext: ModuleType | None, problem: str) -> tuple[str, str]:
    """Return the kind of allocator, and the reason for it."""
    if allocator == "subclass" and problem:
        raise NotSupportedError(f"UMEM_ALLOCATOR=subclass is not available: {problem}")
    if allocator != "auto":
        return allocator, "as configured"
    if _initialized() and _kept is not None:
        return _kept, "torch has kept it since CUDA was initialised"
    if ext is not None and not problem:
        return "subclass", "the torch extension provides it, and all memory tools of torch work"
    return "pluggable", f"the subclass is not available: {problem}"


class _Subclass:
    def __init__(self, ext: ModuleType) -> None:
        global _kept
        self._ext = ext
        try:
            ext.install_cuda_allocator()
        except RuntimeError as error:
            raise StateError(str(error).partition("\n")[0]) from error
        _kept = "subclass"

    def remove(self) -> None:
        self._ext.remove_cuda_allocator()


class _Pluggable:
    def __init__(self) -> None:
        global _kept
        self._before = torch.cuda.memory._get_current_allocator()
        if _kept == "pluggable" and _initialized():
            return
        try:
            torch.cuda.memory.change_current_allocator(_c_functions())
        except RuntimeError as error:
            raise StateError(f"{_TOO_LATE} (torch: {str(error).partition(chr(10))[0]})") from error
        _kept = "pluggable"

    def remove(self) -> None:
        global _kept
        if _initialized():
            return
        torch.cuda.memory.change_current_allocator(self._before)
        _kept = None


def _make_pool() -> Any:
    torch.cuda.init()
    return torch.cuda.MemPool(_c_functions().allocator())


def _initialized() -> bool:
    return bool(torch.cuda.is_initialized())


def _c_functions() -> Any:
    """Return libumem.so's functions as a torch allocator; made once, as torch keeps its address."""
    global _functions
    if _functions is None:
        path = Path(str(core.__file__)).with_name(build.LIBRARY)  # the one that is loaded
        made: Any = torch.cuda.memory.CUDAPluggableAllocator(str(path), "umem_alloc", "umem_free")
        library = ctypes.CDLL(str(path))
        for setter, name in (
            ("set_record_stream_fn", "umem_record_stream"),
            ("set_base_alloc_fn", "umem_base_alloc"),
            ("set_reset_fn", "umem_release_cached"),
            ("set_memory_fraction_fn", "umem_set_memory_fraction"),
        ):
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            getattr(made.allocator(), setter)(address)
        _functions = made
    return _functions
