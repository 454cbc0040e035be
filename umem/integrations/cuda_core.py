"""cuda.core: a memory resource of umem's, whose buffers are managed buffers."""

from __future__ import annotations

import functools
from typing import Any

from ..errors import NotSupportedError, StateError
from ..native import core
from .blocks import Block, require_cuda, stream_handle

try:
    from cuda.core import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
        Buffer,
        ManagedBuffer,
        MemoryResource,
    )
except ImportError as error:
    raise NotSupportedError(
        f"cuda.core cannot be imported, or is older than 1.2 ({error}); install it with "
        "`pip install 'cuda-core[cu13]>=1.2'`"
    ) from error


class UmemMemoryResource(MemoryResource):  # type: ignore[misc, unused-ignore]
    """umem as a memory resource: `device.memory_resource = umem.cuda_core.MemoryResource()`.

    Args:
        device_id: the device's number, or a `cuda.core.Device`.
    """

    def __init__(self, device_id: Any = 0) -> None:
        self._device = int(getattr(device_id, "device_id", device_id))
        self._blocks: dict[int, Block] = {}

    def allocate(self, size: int, stream: Any = None) -> Any:
        """A `ManagedBuffer` of `size` bytes, or a plain `Buffer` where memory is not managed.

        The stream goes by position or by name, as cuda.core had it before and has it since 1.0;
        None is the legacy default stream.

        Raises:
            StateError: umem is off, or the stream captures a CUDA graph.
            NotSupportedError: umem is on with the software device, or it is the per-thread stream.
            ConfigError: there is no such device.
            OutOfMemoryError: budget and host budget cannot hold it.
        """
        require_cuda("umem.cuda_core.MemoryResource")
        block = Block(size, "cuda.core", self._device, stream)
        kind = ManagedBuffer if self.is_managed else Buffer
        if block.ptr == 0:
            return kind.from_handle(0, 0, owner=block)
        self._blocks[block.ptr] = block
        return kind.from_handle(block.ptr, size, mr=self, stream=stream)

    def deallocate(self, ptr: Any, size: int, stream: Any = None) -> None:
        """Free what `allocate` gave, in the order of the stream; cuda.core calls it.

        Raises:
            StateError: the address is none of this resource's.
        """
        del size
        block = self._blocks.pop(int(ptr), None)
        if block is None:
            raise StateError(
                f"{int(ptr):#x} was not allocated by this resource of umem's, or was freed before"
            )
        handle = stream_handle(stream)
        if handle != block.stream and stream is not None:
            core.record_stream(block.ptr, handle)

    @property
    def device_id(self) -> int:
        """The device's number."""
        return self._device

    @property
    def is_device_accessible(self) -> bool:
        """Always."""
        return True

    @property
    def is_host_accessible(self) -> bool:
        """As managed memory is."""
        return self.is_managed

    @property
    def is_managed(self) -> bool:
        """False where the driver has no concurrent managed access."""
        return _managed()


@functools.cache
def _managed() -> bool:
    return core.probe_cuda()["concurrent_managed_access"]
