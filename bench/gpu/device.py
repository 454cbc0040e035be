"""The GPU for the microbenchmarks: direct driver calls, in addition to torch's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gpu import raw, software
from gpu.deadline import Deadline
from gpu.guard import Guard
from gpu.raw import CallError
from umem.base.units import MIB, PAGE_BYTES

ATTACH_GLOBAL = 1
DEVICE, HOST = (1, 0), (2, 0)  # CUmemLocation: type, id
SET_READ_MOSTLY, UNSET_READ_MOSTLY = 1, 2
SET_PREFERRED, UNSET_PREFERRED = 3, 4
SET_ACCESSED_BY, UNSET_ACCESSED_BY = 5, 6
LEGACY_STREAM = 1


@dataclass(frozen=True)
class Block:
    """A range of managed memory, and a float32 tensor over it."""

    ptr: int
    nbytes: int
    tensor: Any

    def part(self, begin: int, nbytes: int) -> Block:
        """Return a part of this block."""
        assert begin + nbytes <= self.nbytes
        return Block(self.ptr + begin, nbytes, self.tensor[begin // 4 : (begin + nbytes) // 4])

    def pieces(self, nbytes: int) -> list[Block]:
        """All of it in pieces of `nbytes`, the last one maybe smaller."""
        return [
            self.part(begin, min(nbytes, self.nbytes - begin))
            for begin in range(0, self.nbytes, nbytes)
        ]


@dataclass(frozen=True)
class AfterKernel:
    """Seconds of an action that a lane takes after a kernel: inside its `call`, from the kernel's
    end until the lane was `done`, and until the kernel's stream could go on: the `bubble`.
    """

    call: float
    done: float
    bubble: float


class _View:
    """Memory that torch wraps in a tensor without a copy."""

    def __init__(self, ptr: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<f4",
            "data": (ptr, False),
            "strides": None,
            "version": 3,
        }


class Gpu:
    """Device 0, its driver calls, a side stream for copies, and the guard on managed memory."""

    def __init__(self, guard: Guard) -> None:
        software.load_if_asked()
        import torch

        from umem.base.native import core

        self.torch: Any = torch
        torch.cuda.init()
        torch.empty(1, device="cuda")  # makes the context current, which the raw calls need
        self.guard = guard
        self.calls: Any = core.driver
        self.calls.open_cuda()
        self.name = str(torch.cuda.get_device_name(0))
        self.software = software.is_software(self.name)
        self.side = torch.cuda.Stream()
        self.lane = int(self.side.cuda_stream)
        self._context = raw.current_context()

    def call(self, name: str, *arguments: Any) -> Any:
        """One driver call that must succeed: what it returns besides its CUresult.

        Raises:
            CallError: it failed.
        """
        answer = getattr(self.calls, name)(*arguments)
        code, *values = answer if isinstance(answer, tuple) else (answer,)
        if code != 0:
            raise CallError(name, code)
        return values[0] if len(values) == 1 else tuple(values)

    def code(self, name: str, *arguments: Any) -> int:
        """Return the CUresult of a driver call that may fail."""
        answer = getattr(self.calls, name)(*arguments)
        return int(answer[0] if isinstance(answer, tuple) else answer)

    @contextlib.contextmanager
    def managed(self, nbytes: int, what: str = "a block") -> Iterator[Block]:
        """Provide untouched managed memory inside the `with` block."""
        with self.guard.share(nbytes, what):
            ptr = self.call("cuMemAllocManaged", nbytes, ATTACH_GLOBAL)
            try:
                view = _View(ptr, nbytes // 4)
                yield Block(ptr, nbytes, self.torch.as_tensor(view, device="cuda"))
            finally:
                self.sync()
                self.call("cuMemFree", ptr)

    def threads(self, count: int) -> ThreadPoolExecutor:
        """Threads that may call the driver: each needs the context as its own first."""
        return ThreadPoolExecutor(count, initializer=raw.use_context, initargs=(self._context,))

    def free_bytes(self) -> int:
        """Return the free bytes of the device."""
        free, _ = self.call("cuMemGetInfo")
        return int(free)

    def sync(self) -> None:
        """Wait for everything."""
        self.torch.cuda.synchronize()

    def prefetch(self, block: Block, where: tuple[int, int], stream: int | None = None) -> None:
        """Start moving a block, on the side stream unless told otherwise."""
        self.call("cuMemPrefetchAsync", block.ptr, block.nbytes, where, 0, self._stream(stream))

    def prefetch_all(self, blocks: list[Block], where: tuple[int, int]) -> None:
        """Do the same for several blocks in one call."""
        self._batch("cuMemPrefetchBatchAsync", blocks, where)

    def renew(self, blocks: list[Block], stream: int | None = None) -> None:
        """Discard them and populate them on the device, by one call."""
        self._batch("cuMemDiscardAndPrefetchBatchAsync", blocks, DEVICE, stream)

    def discard(self, blocks: list[Block], stream: int | None = None) -> None:
        """Say that their bytes are not needed any more."""
        ptrs, sizes = [b.ptr for b in blocks], [b.nbytes for b in blocks]
        self.call("cuMemDiscardBatchAsync", ptrs, sizes, 0, self._stream(stream))

    def advise(self, block: Block, advice: int, where: tuple[int, int] = DEVICE) -> None:
        """Give one advice on a block."""
        self.call("cuMemAdvise", block.ptr, block.nbytes, advice, where)

    def settle(self, block: Block, where: tuple[int, int]) -> None:
        """Have a block there, and wait until it is."""
        self.prefetch(block, where)
        self.sync()

    def seconds(self, action: Callable[[], object]) -> float:
        """Time an action from an idle device until the device is idle again."""
        return self.call_seconds(action)[1]

    def call_seconds(self, action: Callable[[], object]) -> tuple[float, float]:
        """Seconds until the call returned, and until the device was quiet again."""
        self.sync()
        begin = time.perf_counter()
        action()
        returned = time.perf_counter()
        self.sync()
        return returned - begin, time.perf_counter() - begin

    def repeat(
        self,
        deadline: Deadline,
        rounds: int,
        action: Callable[[], object],
        before: Callable[[], object] | None = None,
    ) -> list[float]:
        """Seconds of each round; `before` prepares one. The first, which warms up, is dropped."""
        values: list[float] = []
        for _ in deadline.rounds(rounds + 1):
            if before is not None:
                before()
            values.append(self.seconds(action))
        return values[1:] or values

    def busy(self, milliseconds: float) -> Callable[[], None]:
        """Work for the multiprocessors of about that length, on the current stream."""
        torch = self.torch
        x = torch.ones(256 * MIB // 4 if not self.software else 1024, device="cuda")
        one = max(self._kernel_seconds(lambda: x.mul_(1.0)), 1e-6)
        count = max(int(milliseconds / 1e3 / one), 1)

        def work() -> None:
            for _ in range(count):
                x.mul_(1.0)

        return work

    def spin(self, milliseconds: float) -> Callable[[], None]:
        """One kernel of about that length on the current stream, which uses no memory."""
        sleep, probe = self.torch.cuda._sleep, 1_000_000
        each = max(self._kernel_seconds(lambda: sleep(probe)), 1e-6)
        cycles = int(milliseconds / 1e3 / each * probe)
        return lambda: sleep(cycles)

    def after_kernel(
        self,
        kernel: Callable[[], None],
        lane: Any,
        action: Callable[[int], object],
        waits: bool = True,
    ) -> AfterKernel:
        """Let a kernel run, a lane (a torch stream) wait for it and act, and the kernel's stream
        wait for the lane: the order in which umem's engine moves bytes.

        Without `waits` the lane acts at once. `action` gets the lane's handle.
        """
        home = self.torch.cuda.current_stream()
        end, done, on = (self.torch.cuda.Event(enable_timing=True) for _ in range(3))
        kernel()
        end.record(home)
        if waits:
            lane.wait_event(end)
        call = elapsed(lambda: action(int(lane.cuda_stream)))
        done.record(lane)
        home.wait_event(done)
        on.record(home)
        self.sync()
        return AfterKernel(call, end.elapsed_time(done) / 1e3, end.elapsed_time(on) / 1e3)

    def _kernel_seconds(self, launch: Callable[[], object]) -> float:
        launch()
        return self.seconds(lambda: [launch() for _ in range(50)]) / 50

    def _stream(self, stream: int | None) -> int:
        return self.lane if stream is None else stream

    def _batch(
        self, name: str, blocks: list[Block], where: tuple[int, int], stream: int | None = None
    ) -> None:
        ptrs, sizes = [b.ptr for b in blocks], [b.nbytes for b in blocks]
        self.call(name, ptrs, sizes, [where], [0], 0, self._stream(stream))


def elapsed(action: Callable[[], object]) -> float:
    """Return the seconds until the action returns."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def whole_pages(nbytes: float) -> int:
    """Round down to pages, to at least one."""
    return max(int(nbytes) // PAGE_BYTES, 1) * PAGE_BYTES
