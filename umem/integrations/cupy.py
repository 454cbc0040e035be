"""CuPy: arrays in umem's memory, in the order of CuPy's current stream.

Not by CuPy's `CFunctionAllocator`, because C functions are not told the stream.
"""

from __future__ import annotations

import functools
from typing import Any

from ..errors import NotSupportedError, OutOfMemoryError, StateError
from .blocks import GUESTS, Block, require_cuda

_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation

_installed: list[_Installed] = []


def malloc(nbytes: int) -> Any:
    """A `cupy.cuda.MemoryPointer` to memory of umem's, on the current device and stream.

    For `cupy.cuda.set_allocator`, or under CuPy's own pool: `MemoryPool(umem.cupy.malloc).malloc`.

    Raises:
        StateError: umem is off, or the current stream captures a CUDA graph.
        NotSupportedError: umem is on with the software device, or the current stream is the
            per-thread default stream.
        OutOfMemoryError: budget and host budget cannot hold it. It is a `CUDARuntimeError` too,
            with the status by which CuPy's pool gives its free blocks back and asks again.
    """
    require_cuda("umem.cupy.malloc")
    cuda = _cupy().cuda
    device = int(cuda.runtime.getDevice())
    try:
        block = Block(nbytes, "cupy", device, cuda.get_current_stream())
    except OutOfMemoryError as error:
        raise _out_of_memory()(str(error)) from None
    # With the number of its device, because without CuPy asks the driver for it each time.
    return cuda.MemoryPointer(cuda.UnownedMemory(block.ptr, nbytes, block, device), 0)


def install() -> None:
    """Make `malloc` CuPy's allocator, until `remove` or `umem.disable()`; installed: nothing.

    Raises:
        NotSupportedError: CuPy cannot be imported, or umem is on with the software device.
        StateError: umem is off, or the call is inside `cupy.cuda.using_allocator`.
    """
    require_cuda("umem.cupy.enable()")
    if not _installed:
        _installed.append(_Installed(_cupy().cuda))
        GUESTS.add(_installed[0])


def remove() -> None:
    """Give CuPy the allocator back that it had; arrays of umem stay valid."""
    if _installed:
        _installed[0].remove()


class _Installed:
    def __init__(self, cuda: Any) -> None:
        self._cuda, self._before = cuda, cuda.get_allocator()
        self._set(malloc)

    def remove(self) -> None:
        # Inside of using_allocator, `now` is that one's, and to set it is refused. Who put another
        # one there since, keeps it.
        if self in _installed:
            now = self._cuda.get_allocator()
            self._set(self._before if now is malloc else now)
            _installed.remove(self)

    def _set(self, allocator: Any) -> None:
        try:
            self._cuda.set_allocator(allocator)
        except ValueError as error:
            raise StateError(
                f"CuPy's allocator cannot be changed inside of using_allocator ({error}); do it "
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


@functools.cache
def _out_of_memory() -> type[Exception]:
    error: Any = _cupy().cuda.runtime.CUDARuntimeError

    class CupyOutOfMemoryError(error, OutOfMemoryError):  # type: ignore[misc]
        def __init__(self, message: str) -> None:
            super().__init__(_MEMORY_ALLOCATION)
            self._message = message

        def __str__(self) -> str:
            return self._message

    return CupyOutOfMemoryError
