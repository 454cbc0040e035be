"""CuPy arrays in umem's memory, in the order of CuPy's current stream.

CuPy's `CFunctionAllocator` is not used, because it does not pass the stream to the C functions.
"""

from __future__ import annotations

import functools
from typing import Any

from ..errors import NotSupportedError, OutOfMemoryError, StateError
from .blocks import EXTERNAL, ExternalBlock, require_cuda

_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation

_installed: list[_Installed] = []


def malloc(nbytes: int) -> Any:
    """Allocate memory for the current device and stream, as a `cupy.cuda.MemoryPointer`.

    For `cupy.cuda.set_allocator`, or below CuPy's own pool: `MemoryPool(umem.cupy.malloc).malloc`.

    Raises:
        StateError: umem is off, or the current stream captures a CUDA graph.
        NotSupportedError: umem is on with the software device, or the current stream is the
            per-thread default stream.
        OutOfMemoryError: budget and host budget cannot hold it. It is also a `CUDARuntimeError`
            with the status that makes CuPy's pool return its free blocks and retry.
    """
    require_cuda("umem.cupy.malloc")
    cuda = _cupy().cuda
    device = int(cuda.runtime.getDevice())
    try:
        block = ExternalBlock(nbytes, "cupy", device, cuda.get_current_stream())
    except OutOfMemoryError as error:
        raise _out_of_memory(str(error)) from None
    # The device number is passed because CuPy would otherwise ask the driver for it each time.
    return cuda.MemoryPointer(cuda.UnownedMemory(block.ptr, nbytes, block, device), 0)


def install() -> None:
    """Make `malloc` CuPy's allocator until `remove` or `umem.disable()`; a no-op if it is already.

    Raises:
        NotSupportedError: CuPy cannot be imported, or umem is on with the software device.
        StateError: umem is off, or this is called inside `cupy.cuda.using_allocator`.
    """
    require_cuda("umem.cupy.enable()")
    if not _installed:
        _installed.append(_Installed(_cupy().cuda))
        EXTERNAL.add(_installed[0])


def remove() -> None:
    """Restore CuPy's previous allocator; arrays in umem's memory stay valid."""
    if _installed:
        EXTERNAL.remove_one(_installed[0])


class _Installed:
    def __init__(self, cuda: Any) -> None:
        self._cuda, self._before = cuda, cuda.get_allocator()
        self._set(malloc)

    def remove(self) -> None:
        # Inside using_allocator, `now` is the allocator of that context, and CuPy refuses to set
        # one. An allocator that the program set in the meantime is kept.
        if self in _installed:
            now = self._cuda.get_allocator()
            self._set(self._before if now is malloc else now)
            _installed.remove(self)

    def _set(self, allocator: Any) -> None:
        try:
            self._cuda.set_allocator(allocator)
        except ValueError as error:
            raise StateError(
                f"CuPy's allocator cannot be changed inside using_allocator ({error}); change it "
                "outside, or use `using_allocator(umem.cupy.malloc)`"
            ) from error


@functools.cache
def _cupy() -> Any:
    try:
        import cupy  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise NotSupportedError(
            f"CuPy cannot be imported ({error}); install it with `pip install cupy-cuda13x`"
        ) from error
    return cupy


def _out_of_memory(message: str) -> Exception:
    return _error_class()(message)


@functools.cache
def _error_class() -> type[Exception]:
    error: Any = _cupy().cuda.runtime.CUDARuntimeError

    class CupyOutOfMemoryError(error, OutOfMemoryError):  # type: ignore[misc]
        def __init__(self, message: str) -> None:
            super().__init__(_MEMORY_ALLOCATION)
            self._message = message

        def __str__(self) -> str:
            return self._message

        def __reduce__(self) -> tuple[Any, ...]:  # the class has no name to import it by
            return _out_of_memory, (self._message,)

    return CupyOutOfMemoryError
