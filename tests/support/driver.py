"""One open driver, as the contract suite sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import _core_testing

PAGE = 2 << 20
FRAMES = 16
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, INVALID_HANDLE, NOT_READY = 0, 1, 2, 400, 600
NOT_FOUND, NOT_SUPPORTED = 500, 801
GLOBAL, HOST_ATTACH = 1, 2
DEVICE: tuple[int, int] = (1, 0)
HOST: tuple[int, int] = (2, 0)


@dataclass
class Driver:
    """One open driver: its calls by name, and helpers that are the same for every driver."""

    calls: ModuleType
    stream: int

    def alloc(self, pages: int) -> int:
        result, ptr = self.calls.cuMemAllocManaged(pages * PAGE, GLOBAL)
        assert result == SUCCESS
        return int(ptr)

    def prefetch(self, ptr: int, pages: int, where: tuple[int, int]) -> None:
        assert self.calls.cuMemPrefetchAsync(ptr, pages * PAGE, where, 0, self.stream) == SUCCESS
        assert self.calls.cuStreamSynchronize(self.stream) == SUCCESS

    def discard(self, ptr: int, nbytes: int) -> None:
        assert self.calls.cuMemDiscardBatchAsync([ptr], [nbytes], 0, self.stream) == SUCCESS
        assert self.calls.cuStreamSynchronize(self.stream) == SUCCESS

    def free_frames(self) -> int:
        result, free, _total = self.calls.cuMemGetInfo()
        assert result == SUCCESS
        return int(free) // PAGE

    def states(self, ptr: int, pages: int) -> list[str]:
        return list(self.calls.page_states(ptr, pages * PAGE))


@contextlib.contextmanager
def opened(frames: int = FRAMES, disk: str = "", staging: int = 0) -> Iterator[Driver]:
    """The software device, closed with nothing left allocated.

    Args:
        frames: its pages.
        disk: a folder for evicted pages; empty: they are in this machine's memory.
        staging: with a disk, further frames for pages under way.
    """
    calls = _core_testing
    calls.open_soft(frames * PAGE, "a100-pcie4", disk=disk, staging_bytes=staging * PAGE)
    live: list[int] = []
    result, stream = calls.cuStreamCreate(1)
    assert result == SUCCESS
    made = Driver(calls, stream)
    plain_alloc = made.alloc

    def alloc(pages: int) -> int:
        live.append(plain_alloc(pages))
        return live[-1]

    made.alloc = alloc  # type: ignore[method-assign]
    try:
        yield made
    finally:
        for ptr in live:
            calls.cuMemFree(ptr)
        calls.close()
