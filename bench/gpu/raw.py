"""Driver calls beyond umem's table, for questions that umem itself does not ask."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

RELAXED, GLOBAL = 2, 0  # CUstreamCaptureMode
_ALLOCATION_MANAGED = 2


class CallError(RuntimeError):
    """A driver call failed; `code` is its CUresult."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} returned CUresult {code}")
        self.code = code


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _PoolProps(ctypes.Structure):
    _fields_ = (
        ("alloc_type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("security_attributes", ctypes.c_void_p),
        ("max_size", ctypes.c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    )


def has_entry(name: str, version: int) -> bool:
    """Return whether the driver has an entry point in the form of `version`."""
    function, status = ctypes.c_void_p(), ctypes.c_int()
    code = _cuda().cuGetProcAddress_v2(
        name.encode(), ctypes.byref(function), version, ctypes.c_uint64(0), ctypes.byref(status)
    )
    return code == 0 and bool(function.value)


def current_context() -> int:
    """Return the calling thread's context."""
    context = ctypes.c_void_p()
    _check("cuCtxGetCurrent", _cuda().cuCtxGetCurrent(ctypes.byref(context)))
    return context.value or 0


def use_context(context: int) -> None:
    """Make it the calling thread's."""
    _check("cuCtxSetCurrent", _cuda().cuCtxSetCurrent(ctypes.c_void_p(context)))


@contextlib.contextmanager
def capture(stream: int, mode: int = GLOBAL) -> Iterator[None]:
    """Capture what a stream is given, and throw it away: also when that broke the capture."""
    cuda = _cuda()
    _check("cuStreamBeginCapture", cuda.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), mode))
    try:
        yield
    finally:
        graph = ctypes.c_void_p()
        cuda.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
        if graph.value:
            cuda.cuGraphDestroy(graph)


class ManagedPool:
    """A stream-ordered pool of managed memory (CUDA 13). Its user asks the guard first."""

    def __init__(self) -> None:
        props = _PoolProps(alloc_type=_ALLOCATION_MANAGED, location=_Location(1, 0))
        self._pool = ctypes.c_void_p()
        created = _call("cuMemPoolCreate", ctypes.byref(self._pool), ctypes.byref(props))
        _check("cuMemPoolCreate", created)

    def allocate(self, nbytes: int, stream: int) -> int:
        """Allocate `nbytes` from the pool, in stream order; return the address."""
        ptr = ctypes.c_uint64()
        code = _call(
            "cuMemAllocFromPoolAsync",
            ctypes.byref(ptr),
            ctypes.c_size_t(nbytes),
            self._pool,
            ctypes.c_void_p(stream),
        )
        _check("cuMemAllocFromPoolAsync", code)
        return ptr.value

    def free(self, ptr: int, stream: int) -> None:
        """Give it back in stream order."""
        code = _call("cuMemFreeAsync", ctypes.c_uint64(ptr), ctypes.c_void_p(stream))
        _check("cuMemFreeAsync", code)

    def close(self) -> None:
        """Destroy the pool."""
        _check("cuMemPoolDestroy", _call("cuMemPoolDestroy", self._pool))


def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # loaded already: torch did


def _call(name: str, *arguments: object) -> int:
    function = getattr(_cuda(), name, None)
    return 500 if function is None else int(function(*arguments))  # 500: CUDA_ERROR_NOT_FOUND


def _check(name: str, code: int) -> None:
    if code != 0:
        raise CallError(name, code)
