"""Host memory that umem does not manage: optimizer state, and the way of bytes to it and back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...session.session import host_memory

ALIGNMENT = 64  # bytes: a cache line, and more than any vector register


def empty_like(tensor: Tensor) -> Tensor:
    """Return a tensor on the host as `torch.empty_like` would, outside of umem's memory."""
    return _like(tensor, _bytes(max(_bytes_of(tensor), 1), pinned=False))


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of the tensor in such memory."""
    return empty_like(tensor).copy_(tensor.detach())


def _bytes(count: int, *, pinned: bool) -> Tensor:
    """Return `count` bytes; pinned ones are what a GPU copies to and from beside other work."""
    if pinned:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)
    with host_memory():
        return torch.empty(count, dtype=torch.uint8, device="cpu")


class Staging:
    """A buffer that tensors on their way are laid out in, one after the other."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._memory = _bytes(nbytes, pinned=pinned)
        self._pinned = pinned
        self._used = 0
        self._events: list[torch.cuda.Event] = []

    def fits(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether there is room for tensors like these."""
        return self._used + sum(map(_padded, tensors)) <= self._memory.numel()

    def take(self, tensor: Tensor) -> Tensor:
        """Return room for a tensor like this one."""
        room = self._memory[self._used :]
        self._used += _padded(tensor)
        return _like(tensor, room)

    def busy_until(self, events: Iterable[torch.cuda.Event]) -> None:
        """Note the copies after which the room may be taken back."""
        self._events = list(events)

    def clear(self, at_least: int) -> None:
        """Take all room back, when it is not in use any more; make it at least so large."""
        for event in self._events:
            event.synchronize()
        self._events = []
        self._used = 0
        if self._memory.numel() < at_least:
            self._memory = _bytes(at_least, pinned=self._pinned)


def padded_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that tensors like these take in a `Staging`."""
    return sum(map(_padded, tensors))


def _like(tensor: Tensor, memory: Tensor) -> Tensor:
    """Return the first of these bytes as a tensor like this one, with equal strides if dense."""
    values = memory[: _bytes_of(tensor)].view(tensor.dtype)
    return values.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _padded(tensor: Tensor) -> int:
    return -(-_bytes_of(tensor) // ALIGNMENT) * ALIGNMENT
