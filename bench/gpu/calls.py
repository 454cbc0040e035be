"""The costs of single calls for their caller, and the waits that they cause.

Bounds on the engine: how far libcuda defers a prefetch behind a kernel, how many of its threads
work those off, which calls wait for a way out that is under way, and what compute loses.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from gpu.device import (
    DEVICE,
    DISCARD,
    HOST,
    RENEW,
    SIZE,
    U64,
    Access,
    Action,
    Block,
    Gpu,
    Properties,
    elapsed,
)
from gpu.parts import Bench
from umem.base.units import PAGE_BYTES, format_bytes

PAUSE = 5e-4  # seconds between calls that are timed while bytes leave
OUT_LANE = 3  # the way out; other calls use lane 0
MAPPINGS = 4  # times that memory is mapped beside a copy
Call = Callable[[Block, int], object]  # on a block and a lane


def run(bench: Bench) -> None:
    """Fill the record."""
    _Calls(bench).take_all()


class _Calls(Gpu):
    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self._kernel = self.spin(self.config.kernel_ms)
        self._large = 4 * self.size if 4 * self.size < self.guard.limit // 2 else self.size
        self._verbs: dict[str, Call] = {
            "prefetch out": lambda block, lane: self.prefetch(block, HOST, lane),
            "prefetch in": lambda block, lane: self.prefetch(block, DEVICE, lane),
            "discard": lambda block, lane: self.batch(DISCARD, block, lane=lane),
            "discard and prefetch": lambda block, lane: self.batch(RENEW, block, lane=lane),
        }

    def idle_and_behind(self) -> None:
        """Time each call on an idle lane, and on one that waits for a running kernel."""
        cases = {name: (DEVICE, call) for name, call in self._verbs.items()}
        cases["prefetch of what is there"] = cases["prefetch in"]
        cases["prefetch in"] = (HOST, self._verbs["prefetch in"])
        for size in self.config.calls:
            with self.managed(size) as block:
                for name, (place, call) in cases.items():
                    idle, after = [], []
                    for _ in self.deadline.rounds(self.config.rounds):
                        self.settle(block, place)
                        idle.append(elapsed(partial(call, block, 0)))
                        self.sync()
                        self.settle(block, place)
                        after.append(self.after_kernel(self._kernel, partial(call, block)))
                    label = f"{name} of {format_bytes(size)}"
                    self.add(f"{label}: call, idle", idle, "us")
                    self.add(f"{label}: call, behind a kernel", [call for call, _ in after], "us")
                    self.add(f"{label}: done after the kernel", [done for _, done in after], "us")

    def queue(self) -> None:
        """Time a small fetch alone, and while much leaves, at once or behind a kernel.

        A driver whose only worker runs the way out lets the fetch wait for all of it. The details
        have the `threads` of this process, by name: the driver's are among them.
        """
        kernel = self.spin(1.0)

        def fetch(leaves: bool, behind: bool) -> float:
            self.settle(small, HOST)
            self.settle(large, DEVICE)
            if behind:
                kernel()
                self.lanes[OUT_LANE].wait_stream(self.torch.cuda.current_stream())
            moving = self._leaving(large) if leaves else None
            _, took = self.after_kernel(kernel, partial(self._verbs["prefetch in"], small))
            if moving is not None:
                moving.result()
            return took

        with self.managed(PAGE_BYTES) as small, self.managed(self._large) as large:
            beside = f"while {format_bytes(large.nbytes)} leave"
            cases = {"alone": (False, False), beside: (True, False)}
            for label, case in {**cases, f"{beside} behind a kernel": (True, True)}.items():
                seconds = self.rounds(partial(fetch, *case))
                self.add(f"fetch of {format_bytes(PAGE_BYTES)} {label}", seconds, "ms")
        tasks = Path("/proc/self/task").iterdir()
        names = [(task / "comm").read_text(encoding="utf-8").strip() for task in tasks]
        self.record.details["threads"] = {name: names.count(name) for name in sorted(set(names))}

    def waiting(self) -> None:
        """Time calls that need the driver's lock of the address space, or the process's."""
        x = self.torch.ones(256, device="cuda")
        with self.managed(self.config.calls[-1]) as block, self.managed(self._large) as large:
            calls: dict[str, Action] = {
                "cuMemAllocManaged and cuMemFree": self._allocate,
                "mmap and munmap": lambda: mmap.mmap(-1, PAGE_BYTES).close(),
                "discard": partial(self.batch, DISCARD, block),
                "launch of a kernel": partial(x.mul_, 1.0),
            }
            for name, call in calls.items():
                self.add(f"{name}, alone", self.rounds(partial(elapsed, call)), "us")
                during: list[float] = []
                for _ in self.deadline.rounds(self.config.rounds):
                    self.settle(large, DEVICE)
                    moving = self._leaving(large)
                    during.append(elapsed(call))
                    while not moving.done():
                        time.sleep(PAUSE)
                        during.append(elapsed(call))
                    moving.result()
                self.add(f"{name}, while bytes leave", during, "us")
                self.add(f"{name}, while bytes leave, longest", [max(during)], "us")

    def mapping(self) -> None:
        """Time the calls that map device memory, alone and beside copies, whole or in pieces.

        `backing=mapped` makes them for each block that comes or leaves.
        """
        size, copy = self.config.calls[-1], self.pinned_copies()
        reserve = (SIZE(size), SIZE(0), U64(0), U64(0))
        span = (U64(self.driver.number("cuMemAddressReserve", *reserve)), SIZE(size))
        handle, made, access = U64(), ctypes.byref(Properties()), ctypes.byref(Access())
        calls = {
            "cuMemCreate": (ctypes.byref(handle), SIZE(size), made, U64(0)),
            "cuMemMap": (*span, SIZE(0), handle, U64(0)),
            "cuMemSetAccess": (*span, access, SIZE(1)),
            "cuMemUnmap": span,
            "cuMemRelease": (handle,),
        }

        cases = [("alone", "", 0)]
        for piece in (self.size, self.config.calls[0]):
            beside = f"copies of {format_bytes(piece)}"
            cases += [(f"beside {beside} {way}", way, piece) for way in ("out", "in")]
        for label, way, piece in cases:
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in self.deadline.rounds(self.config.rounds):
                self.sync()
                if way:
                    copy(way, piece)
                for name, arguments in tuple(calls.items()) * MAPPINGS:
                    times[name].append(elapsed(partial(self.driver.call, name, *arguments)))
            self.sync()
            for name, seconds in times.items():
                self.add(f"{name} of {format_bytes(size)}, {label}", seconds, "us")
        self.driver.call("cuMemAddressFree", *span)

    def _allocate(self) -> None:
        with self.guard.share(PAGE_BYTES, "an allocation to time"):
            self.free(self.allocate(PAGE_BYTES))

    def _leaving(self, block: Block) -> Future[None]:
        """Start moving a block out by a thread, and return a moment later."""
        moving = self.threads.submit(self.prefetch, block, HOST, OUT_LANE)
        time.sleep(1e-3)
        return moving
