"""The GPU as measurements use it: driver calls by ctypes, torch for kernels and events.

It needs torch and the driver only: neither umem's native core nor its extension for torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gpu.parts import Bench
from gpu.record import CallError

SOFTWARE = "softcuda"  # in the names of the software driver's devices
LANES = 4
ATTACH_GLOBAL = 1
Place = tuple[int, int]  # CUmemLocation: type, id
DEVICE, HOST = (1, 0), (2, 0)
DISCARD, RENEW = "cuMemDiscardBatchAsync", "cuMemDiscardAndPrefetchBatchAsync"
# The CUDA version of the form that is called: the exported names may be older forms.
ENTRIES = {
    "cuDriverGetVersion": 2020, "cuCtxGetCurrent": 4000, "cuCtxSetCurrent": 4000,
    "cuMemAllocManaged": 6000, "cuMemFree": 3020,
    "cuMemPrefetchAsync": 12020, "cuMemPrefetchBatchAsync": 13000, DISCARD: 13000, RENEW: 13000,
    "cuMemAddressReserve": 10020, "cuMemAddressFree": 10020, "cuMemCreate": 10020,
    "cuMemRelease": 10020, "cuMemMap": 10020, "cuMemUnmap": 10020, "cuMemSetAccess": 10020,
}  # fmt: skip
Action = Callable[[], object]
U64, SIZE, POINTER = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p


@functools.cache
def software_driver() -> Any:
    """Return tests/softcuda/load.py, with its driver loaded where SOFTCUDA_LIB names it, else None.

    Call it before torch is imported.
    """
    if not os.environ.get("SOFTCUDA_LIB"):
        return None
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "softcuda"))
    module = importlib.import_module("load")
    module.load()
    return module


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp: of memory that is mapped, by default the device's."""

    _fields_ = (
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Location),
        ("metadata", POINTER), ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__(1, 0, _Location(*DEVICE))


class Access(ctypes.Structure):
    """CUmemAccessDesc: reads and writes by the device."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))

    def __init__(self) -> None:
        super().__init__(_Location(*DEVICE), 3)


class Driver:
    """Entry points of libcuda, each in the form of its version in `ENTRIES`."""

    def __init__(self) -> None:
        find = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
        self.found: dict[str, Any] = {}
        for name, version in ENTRIES.items():
            place, status = POINTER(), ctypes.c_int()
            asked = (ctypes.byref(place), version, U64(0), ctypes.byref(status))
            if find(name.encode(), *asked) == 0 and place.value:
                self.found[name] = ctypes.CFUNCTYPE(ctypes.c_int)(place.value)

    def call(self, name: str, *arguments: Any) -> None:
        """Make a call.

        Raises:
            CallError: it failed, or the driver lacks it.
        """
        if code := self.found[name](*arguments) if name in self.found else 500:
            raise CallError(name, code)

    def number(self, name: str, *arguments: Any) -> int:
        """Return what a call writes to the address that is its first argument."""
        value = U64()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value


class Block(NamedTuple):
    """A range of managed memory, and a float32 tensor over it."""

    ptr: int
    nbytes: int
    tensor: Any = None

    def pieces(self, nbytes: int) -> list[Block]:
        """Return all of it in pieces of `nbytes`, the last one maybe smaller, without tensors."""
        starts = range(0, self.nbytes, nbytes)
        return [Block(self.ptr + at, min(nbytes, self.nbytes - at)) for at in starts]


Job = tuple[Sequence[Block], Place]  # pieces that one thread moves there, a call each


class Gpu:
    """Device 0 for the measurements of one part.

    It has streams of its own ("lanes"), threads that call the driver, and `size`: the bytes of one
    measurement.
    """

    def __init__(self, bench: Bench) -> None:
        software_driver()
        import torch

        self.torch: Any = torch
        torch.empty(1, device="cuda")  # makes the context current, which the calls need
        self.record, self.config, self.deadline = bench.record, bench.config, bench.deadline
        self.guard, self.driver = bench.guard, Driver()
        self.size = min(bench.config.block, bench.guard.limit // 4)
        self.lanes: list[Any] = [torch.cuda.Stream() for _ in range(LANES)]
        context = POINTER(self.driver.number("cuCtxGetCurrent"))
        self.threads = ThreadPoolExecutor(
            LANES, initializer=self.driver.call, initargs=("cuCtxSetCurrent", context)
        )

    def take_all(self) -> None:
        """Take the measurements: the subclass's public methods, in their order there."""
        names = [name for name in vars(type(self)) if not name.startswith("_")]
        self.record.take({name: getattr(self, name) for name in names}, self.deadline)

    @contextlib.contextmanager
    def managed(self, nbytes: int, filled: bool = True) -> Iterator[Block]:
        """Provide managed memory inside the `with` block: ones, or untouched."""
        with self.guard.share(nbytes, "a block"):
            ptr = self.allocate(nbytes)
            view: Any = type("View", (), {})()  # memory that torch wraps without a copy
            view.__cuda_array_interface__ = {
                "shape": (nbytes // 4,), "typestr": "<f4", "data": (ptr, False), "strides": None,
                "version": 3,
            }  # fmt: skip
            try:
                block = Block(ptr, nbytes, self.torch.as_tensor(view, device="cuda"))
                if filled:
                    self.fill(block)
                yield block
            finally:
                self.sync()
                self.free(ptr)

    def pinned_copies(self) -> Callable[[str, int], None]:
        """Return a function that starts to copy `size` bytes "in" or "out", in pieces of so many.

        It copies between plain device memory and pinned memory, each way on a lane of its own.
        """
        torch, count = self.torch, self.size // 4
        lanes = dict(zip(("in", "out"), self.lanes, strict=False))
        pairs = {
            way: (torch.empty(count, device="cuda"), torch.empty(count, pin_memory=True))
            for way in lanes
        }

        def start(way: str, piece: int) -> None:
            parts = (each.split(piece // 4) for each in pairs[way])
            with torch.cuda.stream(lanes[way]):
                for device, host in zip(*parts, strict=True):
                    to, of = (device, host) if way == "in" else (host, device)
                    to.copy_(of, non_blocking=True)

        return start

    def allocate(self, nbytes: int) -> int:
        """Allocate managed memory that the guard has granted."""
        return self.driver.number("cuMemAllocManaged", SIZE(nbytes), ctypes.c_uint(ATTACH_GLOBAL))

    def free(self, ptr: int) -> None:
        """Free memory of the driver."""
        self.driver.call("cuMemFree", U64(ptr))

    def sync(self) -> None:
        """Wait for everything."""
        self.torch.cuda.synchronize()

    def fill(self, block: Block) -> None:
        """Have a block on the device, written by a kernel."""
        self.settle(block, DEVICE)
        block.tensor.fill_(1.0)
        self.sync()

    def prefetch(self, block: Block, where: Place, lane: int = 0) -> None:
        """Start moving a block, or populating it, on a lane."""
        span, flags = (U64(block.ptr), SIZE(block.nbytes)), ctypes.c_uint(0)
        stream = POINTER(int(self.lanes[lane].cuda_stream))
        self.driver.call("cuMemPrefetchAsync", *span, _Location(*where), flags, stream)

    def settle(self, block: Block, where: Place) -> None:
        """Have a block there, and wait until it is."""
        self.prefetch(block, where)
        self.sync()

    def batch(self, name: str, *blocks: Block, lane: int = 0) -> None:
        """Discard blocks, or renew them: discard them and populate them on the device."""
        count, first = len(blocks), ctypes.byref(SIZE(0))
        ptrs = (U64 * count)(*(block.ptr for block in blocks))
        sizes = (SIZE * count)(*(block.nbytes for block in blocks))
        places = (ctypes.byref(_Location(*DEVICE)), first, SIZE(1)) if name == RENEW else ()
        stream = POINTER(int(self.lanes[lane].cuda_stream))
        self.driver.call(name, ptrs, sizes, SIZE(count), *places, ctypes.c_ulonglong(0), stream)

    def move(self, job: Job, lane: int) -> None:
        """Move the job's pieces on a lane."""
        for piece in job[0]:
            self.prefetch(piece, job[1], lane)

    def spin(self, milliseconds: float) -> Action:
        """Return a kernel of about that length on the current stream, which uses no memory."""
        sleep, probe = self.torch.cuda._sleep, 1_000_000
        each = max(statistics.median(self.timed(partial(sleep, probe))), 1e-6)
        return partial(sleep, int(milliseconds / 1e3 / each * probe))

    def after_kernel(self, kernel: Action, action: Callable[[int], object]) -> tuple[float, float]:
        """Let a kernel run, and lane 0 wait for it and act, as umem's engine moves bytes.

        Returns seconds: inside the action, which gets the lane, and from the kernel's end until
        the lane was done, for which the kernel's stream waits.
        """
        home, lane = self.torch.cuda.current_stream(), self.lanes[0]
        end, done = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        kernel()
        end.record(home)
        lane.wait_event(end)
        call = elapsed(partial(action, 0))
        home.wait_stream(lane)
        done.record(home)
        self.sync()
        return call, end.elapsed_time(done) / 1e3

    def seconds(self, action: Action) -> float:
        """Time an action from an idle device until the device is idle again."""
        self.sync()
        begin = time.perf_counter()
        action()
        self.sync()
        return time.perf_counter() - begin

    def rounds(self, measure: Callable[[], float]) -> list[float]:
        """Return the values of all rounds but the first, which warms up."""
        values = [measure() for _ in self.deadline.rounds(self.config.rounds + 1)]
        return values[1:] or values

    def timed(self, action: Action, before: Action = lambda: None) -> list[float]:
        """Return the seconds of each round; `before` prepares it."""
        return self.rounds(lambda: (before(), self.seconds(action))[1])

    def add(self, label: str, seconds: Sequence[float], unit: str, nbytes: int = 0) -> float:
        """Keep times in "us" or "ms", or as "GB/s" of `nbytes`; return the median."""
        if unit == "GB/s":
            return self.record.add(label, [nbytes / value / 1e9 for value in seconds], unit)
        factor = {"us": 1e6, "ms": 1e3}[unit]
        return self.record.add(label, [factor * value for value in seconds], unit)


def elapsed(action: Action) -> float:
    """Return the seconds until the action returns."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin
