"""Arrays in umem's memory for programs without a framework: Numba, ctypes, custom kernels."""

from __future__ import annotations

import sys
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ..base.streams import stream_handle
from ..errors import ConfigError, StateError
from . import dlpack
from .blocks import ExternalBlock, on_gpu

if TYPE_CHECKING:
    import numpy as np


_EMPTY = 64  # the address of an array without elements: numpy before 2.3 takes no null pointer


class Buffer:
    """An array in umem's managed memory, without operators.

    Other libraries use it without a copy: by `__cuda_array_interface__` (Numba, CuPy, torch,
    cuda.core) and by DLPack, as plain CUDA memory. On the software device it is CPU memory, with
    `__array_interface__` (numpy) and DLPack. The memory is freed with its last owner. It is not
    initialised.

    Args:
        shape: the number of elements, or the size of each dimension; contiguous, the last dimension
            varies fastest.
        dtype: a numpy type of numbers, or bool.
        device: the device's number.
        stream: the first stream to use the array, of any framework, or its handle. Once freed, the
            memory is reused in the order of this stream. None: the legacy default stream.

    Raises:
        ConfigError: a bad shape, type or device.
        StateError: umem is off, or a CUDA graph is being captured on the stream.
        OutOfMemoryError: budget and host budget cannot hold it.
    """

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: object = "uint8",
        *,
        device: int = 0,
        stream: object = None,
    ) -> None:
        self._block: ExternalBlock | None = None
        self._lent: ExternalBlock | None = None  # to arrays, which keep this object
        self.shape, self.dtype = _shape(shape), _dtype(dtype)
        nbytes = self.dtype.itemsize
        for n in self.shape:
            nbytes *= n
        if nbytes > sys.maxsize:
            raise ConfigError(
                f"umem.Buffer({shape!r}, {str(self.dtype)!r}): {nbytes} bytes; allowed: up to "
                f"{sys.maxsize}"
            )
        self.nbytes = nbytes
        self._block = ExternalBlock(nbytes, "Buffer", device, stream)
        self.device = device
        self._on_gpu = on_gpu()

    def __repr__(self) -> str:
        place = "freed" if self._block is None else f"device {self.device}"
        return f"<umem.Buffer {self.shape} {self.dtype} ({self.nbytes} bytes), {place}>"

    @property
    def ptr(self) -> int:
        """The address; 0 for an array of 0 bytes.

        Raises:
            StateError: the buffer was freed.
        """
        return self._live().ptr

    @property
    def stream(self) -> int:
        """The handle of the stream in whose order the memory is reused."""
        return self._live().stream

    def free(self) -> None:
        """Release the memory; arrays and DLPack consumers that were made from it keep it.

        Once an array interface was read, the memory stays as long as this object, which is all
        that arrays made through it refer to.
        """
        self._block = None

    def record_stream(self, stream: object) -> None:
        """Let another stream use the array too, after the work now queued on its own stream.

        The memory is reused when both streams are done with it.
        """
        self._live().also_on(stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface, version 3; AttributeError on the software device."""
        if not self._on_gpu:
            raise AttributeError("a Buffer on the software device is for __array_interface__")
        self._lent = self._live()
        return {**self._interface(empty=0), "stream": self._live().stream or 1}  # 1: legacy default

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The array interface, version 3; AttributeError on a GPU."""
        if self._on_gpu:
            raise AttributeError("a Buffer on a GPU is for __cuda_array_interface__")
        self._lent = self._live()
        return self._interface()

    def __umem_span__(self) -> tuple[int, int, int]:
        """Return the address, the bytes and the stream, for umem's own use."""
        block = self._live()
        return block.ptr, self.nbytes, block.stream

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (CUDA, device number), or (CPU, 0) on the software device."""
        return (dlpack.CUDA, self.device) if self._on_gpu else (dlpack.CPU, 0)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return a DLPack capsule, by the array API's protocol; it keeps the memory alive.

        Raises:
            BufferError: another device or a copy is requested, or umem cannot wait on the stream.
        """
        dlpack.check_request(self.__dlpack_device__(), dl_device, copy)
        if self._on_gpu and stream != -1:  # -1: the consumer waits itself
            block, consumer = self._live(), _consumer(stream)
            try:
                block.also_on(consumer)
            except StateError as error:
                raise BufferError(str(error)) from error
        return dlpack.place_on(_capsule(self, max_version), *self.__dlpack_device__())

    def _live(self) -> ExternalBlock:
        if self._block is None:
            raise StateError("this umem.Buffer was freed")
        return self._block

    def _interface(self, empty: int = _EMPTY) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._live().ptr or empty, False),
            "strides": None,
            "version": 3,
        }


class _Held:
    """The base object of a numpy array, which keeps the block alive."""

    def __init__(self, buffer: Buffer) -> None:
        self.block, self.__array_interface__ = buffer._live(), buffer._interface()


def _capsule(buffer: Buffer, max_version: tuple[int, int] | None) -> object:
    """Return a capsule from numpy for the address; numpy does not read the memory."""
    import numpy as np

    array = np.asarray(_Held(buffer))
    try:
        return array.__dlpack__(max_version=max_version)
    except TypeError:  # numpy before 2.1
        return array.__dlpack__()


def _consumer(stream: int | None) -> int:
    if stream == 0 and stream is not None:
        raise BufferError("stream=0 is ambiguous in DLPack: 1 is the legacy default stream")
    try:
        return stream_handle(stream)
    except (TypeError, RuntimeError) as error:
        raise BufferError(str(error)) from error


def _shape(shape: object) -> tuple[int, ...]:
    sizes = shape if isinstance(shape, (tuple, list)) else (shape,)
    if not all(isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= 0 for n in sizes):
        raise ConfigError(f"umem.Buffer({shape!r}): allowed: a size >= 0, or a tuple of such sizes")
    return tuple(map(int, sizes))


def _dtype(dtype: Any) -> np.dtype[Any]:
    import numpy as np

    try:
        found: np.dtype[Any] | None = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.kind not in "biufc":
        raise ConfigError(f"umem.Buffer(..., dtype={dtype!r}): allowed: numpy types of numbers")
    return found
