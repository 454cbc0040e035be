"""A memory resource for cuda.core, whose buffers are in umem's managed memory."""

from __future__ import annotations

import functools
from typing import Any

from ..base.native import core
from ..base.streams import stream_handle
from ..errors import NotSupportedError, StateError
from .blocks import ExternalBlock, require_cuda

try:
    from cuda.core import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
        Buffer,
        ManagedBuffer,
    )
    from cuda.core import MemoryResource as _Base
except ImportError as error:
    raise NotSupportedError(
        f"cuda.core cannot be imported, or is older than 1.2 ({error}); install it with "
        "`pip install 'cuda-core[cu13]>=1.2'`"
    ) from error


class MemoryResource(_Base):  # type: ignore[misc, unused-ignore]
    """umem as a memory resource: `device.memory_resource = umem.cuda_core.MemoryResource()`.

    Args:
        device_id: the device's number, or a `cuda.core.Device`.
    """

    def __init__(self, device_id: Any = 0) -> None:
        self._device = int(getattr(device_id, "device_id", device_id))
        self._blocks: dict[int, ExternalBlock] = {}

    def allocate(self, size: int, stream: Any = None) -> Any:
        """Return a `ManagedBuffer` of `size` bytes, or a `Buffer` where memory is not managed.

        The stream may be given by position, as before cuda.core 1.0, or by name, as since then;
        None is the legacy default stream.

        Raises:
            StateError: umem is off, or the stream captures a CUDA graph.
            NotSupportedError: umem is on with the software device, or the stream is the per-thread
                default stream.
            ConfigError: there is no such device.
            OutOfMemoryError: budget and host budget cannot hold it.
        """
        require_cuda("umem.cuda_core.MemoryResource")
        block = ExternalBlock(size, "cuda.core", self._device, stream)
        kind = ManagedBuffer if self.is_managed else Buffer
        if block.ptr == 0:
            return kind.from_handle(0, 0, owner=block)
        self._blocks[block.ptr] = block
        return kind.from_handle(block.ptr, size, mr=self, stream=stream)

    def deallocate(self, ptr: Any, size: int, stream: Any = None) -> None:
        """Free a block from `allocate`, in the order of the stream; called by cuda.core.

        Raises:
            StateError: the address is not a live block of this resource.
        """
        del size
        handle = stream_handle(stream)  # first: if it is refused, the block stays allocated
        block = self._blocks.pop(int(ptr), None)
        if block is None:
            raise StateError(
                f"{int(ptr):#x} was not allocated by this memory resource, or is freed already"
            )
        if handle != block.stream and stream is not None:
            core.record_stream(block.ptr, handle)

    @property
    def device_id(self) -> int:
        """The device's number."""
        return self._device

    @property
    def is_device_accessible(self) -> bool:
        """Always True: devices can access the memory."""
        return True

    @property
    def is_host_accessible(self) -> bool:
        """True if the host can access the memory: it is managed."""
        return self.is_managed

    @property
    def is_managed(self) -> bool:
        """True if memory is managed, which not every driver, device and backing has."""
        return _managed() and core.current_options().backing == "managed"


@functools.cache
def _managed() -> bool:
    return core.probe_cuda()["available"]
