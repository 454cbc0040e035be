"""Host memory that umem does not manage: optimizer state, and the way of bytes to it and back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...session.session import host_memory

ALIGNMENT = 64  # bytes: a cache line, and more than any vector register


def layout_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that `torch.empty_like` gives: dense, in the tensor's order."""
    return tuple(torch.empty_like(tensor, device="meta").stride())


def copy_of(tensor: Tensor, strides: tuple[int, ...] | None = None) -> Tensor:
    """Return a copy on the host, outside of umem's memory; with its own layout by default."""
    memory = _bytes(max(_bytes_of(tensor), 1), pinned=False)
    return _like(tensor, memory, strides or layout_of(tensor)).copy_(tensor.detach())


def _bytes(count: int, *, pinned: bool) -> Tensor:
    """Return `count` bytes; pinned ones are what a GPU copies to and from beside other work."""
    if pinned:
        return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)
    with host_memory():
        return torch.empty(count, dtype=torch.uint8, device="cpu")


class Staging:
    """A buffer that tensors on their way are laid out in, one after the other."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._memory = _bytes(nbytes, pinned=pinned)
        self.pinned = pinned
        self._room = nbytes
        self._used = 0
        self._events: list[torch.cuda.Event] = []

    def fits(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether there is room for tensors like these."""
        return self._used + padded_bytes(tensors) <= self._room

    def take(self, tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
        """Return room for a tensor of this shape and type, with these dense strides."""
        room = self._memory[self._used :]
        self._used += padded_bytes([tensor])
        return _like(tensor, room, strides)

    def busy_until(self, events: Iterable[torch.cuda.Event]) -> None:
        """Note the copies after which the room may be taken back."""
        self._events = list(events)

    def clear(self, nbytes: int) -> None:
        """Take all room back, when it is not in use any more; make it so large."""
        for event in self._events:
            event.synchronize()
        self._events = []
        self._used = 0
        self._room = nbytes
        if self._memory.numel() < nbytes:
            self._memory = _bytes(nbytes, pinned=self.pinned)


def padded_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that tensors like these take in a `Staging`."""
    return sum(-(-_bytes_of(tensor) // ALIGNMENT) * ALIGNMENT for tensor in tensors)


def _like(tensor: Tensor, memory: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the first of these bytes as a tensor of this shape and type."""
    return memory[: _bytes_of(tensor)].view(tensor.dtype).as_strided(tensor.shape, strides)


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
