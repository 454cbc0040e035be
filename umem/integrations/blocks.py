"""Blocks of umem's memory for frameworks other than torch: their holders and streams.

A block is freed with its last reference: an array, a view of it, or a consumer of its DLPack
capsule. All blocks come from the one native allocator, so all frameworks share one budget and one
residency table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..base.native import core
from ..base.streams import stream_handle
from ..errors import ConfigError, NotSupportedError, StateError
from .bindings import Bindings

EXTERNAL = Bindings()  # parts in frameworks other than torch; removed when umem is turned off

# Address -> (holder, bytes). Only single dict operations are used, because the garbage collector
# may free a block between any two lines.
_held: dict[int, tuple[str, int]] = {}
# The engine records events on streams as long as it knows of blocks on them, and a framework
# destroys a stream with its last reference, so the streams are kept here.
_streams: dict[tuple[int, int], object] = {}


class ExternalBlock:
    """One allocation for a framework other than torch.

    Args:
        nbytes: bytes; a block of 0 bytes takes no memory and has address 0.
        holder: the holder's name in `umem.summary()`.
        device: the device's number.
        stream: the stream that uses the block first; after a free, the memory is reused in its
            order. Kept alive.

    Raises:
        ConfigError: there is no such device, or the software device was given a stream.
        StateError: umem is off, or a CUDA graph is being captured on the stream.
        OutOfMemoryError: budget and host budget cannot hold it.
    """

    __slots__ = ("__weakref__", "device", "nbytes", "ptr", "stream")

    def __init__(self, nbytes: int, holder: str, device: int = 0, stream: object = None) -> None:
        self.ptr = 0  # first, for __del__
        handle = stream_handle(stream)
        _check_place(device, handle)
        self.nbytes, self.device, self.stream = nbytes, device, handle
        if nbytes == 0:
            return
        if core.stream_captures(device, handle):
            raise StateError(
                "a CUDA graph is being captured on the stream, and umem's memory cannot be a part "
                "of it; allocate before the capture starts"
            )
        self.ptr = core.allocate(nbytes, device, handle)
        _held[self.ptr] = (holder, nbytes)
        _keep(device, handle, stream)

    def also_on(self, stream: object) -> None:
        """Let another stream use the block too, after the work now queued on its own stream.

        The memory is reused after both streams are done with it.
        """
        handle = stream_handle(stream)
        if handle != self.stream and self.ptr:
            core.wait_stream(self.device, handle, self.stream)
            core.record_stream(self.ptr, handle)
            _keep(self.device, handle, stream)

    # Default arguments still exist at interpreter shutdown, unlike the names of modules.
    def __del__(
        self,
        forget: Callable[[int, None], object] = _held.pop,
        release: Callable[[int], bool] = core.release,
    ) -> None:
        if self.ptr:
            forget(self.ptr, None)  # first, because a released address may be reused immediately
            release(self.ptr)


def holders() -> dict[str, tuple[int, int]]:
    """Return the number of live blocks and their bytes by holder, most bytes first."""
    found: dict[str, tuple[int, int]] = {}
    for holder, nbytes in list(_held.values()):
        count, total = found.get(holder, (0, 0))
        found[holder] = (count + 1, total + nbytes)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def umem_turned_off() -> None:
    """Release the programs' streams, unless blocks that are still alive may need them."""
    if core.stats()["live_bytes"] == 0:
        _streams.clear()


def require_cuda(what: str) -> None:
    """Raise unless umem is on, on GPUs.

    Raises:
        StateError: umem is off.
        NotSupportedError: umem is on with the software device, whose memory no GPU can read.
    """
    if not core.running():
        raise StateError(f"{what} needs umem to be on; call umem.enable() first")
    if core.current_options().device != "cuda":
        raise NotSupportedError(
            f"{what} needs a GPU, and umem is on with the software device; use UMEM_DEVICE=cuda"
        )


def on_gpu() -> bool:
    """Return whether umem's memory is on a GPU; on the software device it is CPU memory."""
    return core.current_options().device == "cuda"


def _keep(device: int, handle: int, stream: object) -> None:
    # A number, such as that of a DLPack consumer, keeps nothing alive: an object replaces it.
    if handle and isinstance(_streams.get((device, handle), handle), int):
        _streams[device, handle] = stream


def _check_place(device: int, handle: int) -> None:
    if device == 0 and handle == 0:
        return
    if not on_gpu():
        if handle:
            raise ConfigError("the software device has no streams for programs; leave out stream=")
        if device != 0:
            raise ConfigError(f"device={device!r}: allowed: 0, the only software device")
    elif device not in range(_device_count()):
        raise ConfigError(f"device={device!r}: allowed: 0 to {_device_count() - 1}")


@functools.cache
def _device_count() -> int:
    return len(core.probe_cuda()["devices"])
