"""Host memory outside umem: optimizer state, and the staging of copies to and from it."""

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
    """Return `count` bytes; a GPU copies to and from pinned ones concurrently with other work."""
    if pinned:
        return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)
    with host_memory():
        return torch.empty(count, dtype=torch.uint8, device="cpu")


class Staging:
    """A buffer in which tensors in transit are laid out one after the other."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._memory = _bytes(nbytes, pinned=pinned)
        self.pinned = pinned
        self._room = nbytes
        self._used = 0
        self._events: list[torch.cuda.Event] = []

    @property
    def nbytes(self) -> int:
        """The bytes of its memory."""
        return self._memory.nbytes

    def fits(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether tensors like these fit."""
        return self._used + padded_bytes(tensors) <= self._room

    def take(self, tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
        """Take memory for a tensor of this shape and type, with these dense strides."""
        room = self._memory[self._used :]
        self._used += padded_bytes([tensor])
        return _like(tensor, room, strides)

    def busy_until(self, events: Iterable[torch.cuda.Event]) -> None:
        """Record the copies after which the memory may be reused."""
        self._events = list(events)

    def clear(self, nbytes: int) -> None:
        """Reuse all memory, once its copies are done; resize it to this capacity."""
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
    """Return the start of these bytes as a tensor of this shape and type."""
    return memory[: _bytes_of(tensor)].view(tensor.dtype).as_strided(tensor.shape, strides)


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
