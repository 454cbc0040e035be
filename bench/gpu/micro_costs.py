"""Cost of single operations: allocations, first touches, faults, remote reads, hints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from gpu import raw
from gpu.config import Config
from gpu.deadline import Deadline
from gpu.device import (
    ATTACH_GLOBAL,
    DEVICE,
    HOST,
    SET_ACCESSED_BY,
    SET_PREFERRED,
    UNSET_ACCESSED_BY,
    UNSET_PREFERRED,
    Block,
    Gpu,
)
from gpu.micro import Micro
from gpu.record import Item, Record, take
from umem.base.units import MIB, format_bytes

PAGE = 2 * MIB
FLOATS_A_PAGE = PAGE // 4
GAP_KERNELS = 200


def run(gpu: Gpu, record: Record, config: Config, deadline: Deadline) -> None:
    """Fill the record."""
    bench = _Costs(gpu, record, config, deadline)
    items = [
        Item("10", "what does an allocation cost?", bench.allocations),
        Item("11", "does the host give its memory back?", bench.host_memory),
        Item("12", "how fast is reading the host's memory in place?", bench.zero_copy),
        Item("12 op", "which operators suffer from it more than from faults?", bench.in_place),
        Item("14", "what does a page fault cost?", bench.faults),
        Item("21", "what does a hint cost between two kernels?", bench.hints),
    ]
    take(record, items, deadline)


class _Costs(Micro):
    def allocations(self) -> None:
        for size in self._config.alloc_sizes:
            if size <= self._gpu.guard.room:
                self._allocations_of(size)
        self._pool()
        fresh, again = self._first_touch()
        self._decide(
            "10",
            "what does an allocation cost?",
            f"the first touch of a prefetched block takes {fresh / again:.2f}x of a later one",
        )

    def _allocations_of(self, size: int) -> None:
        gpu, taken = self._gpu, []
        with gpu.guard.share(size, "an allocation to time"):
            for _ in self._deadline.rounds(self._config.rounds):
                begin = time.perf_counter()
                ptr = gpu.call("cuMemAllocManaged", size, ATTACH_GLOBAL)
                taken.append(1e6 * (time.perf_counter() - begin))
                gpu.call("cuMemFree", ptr)
        self._record.add(f"cuMemAllocManaged of {format_bytes(size)}", taken, "us")

    def _pool(self) -> None:
        gpu, size = self._gpu, self._config.alloc_sizes[0]
        if not raw.has_entry("cuMemPoolCreate", 13000) or gpu.software:
            self._record.decide("10 pool", "does a managed pool work?", "this driver has none")
            return
        values = []
        with gpu.guard.share(2 * size, "a managed pool's block"):
            pool = raw.ManagedPool()
            for _ in self._deadline.rounds(self._config.rounds):
                begin = time.perf_counter()
                pool.free(pool.allocate(size, gpu.lane), gpu.lane)
                values.append(1e6 * (time.perf_counter() - begin))
            gpu.sync()
            pool.close()
        self._record.add(f"managed pool, {format_bytes(size)} and back", values, "us")
        self._record.decide("10 pool", "does a managed pool work?", "yes")

    def _first_touch(self) -> tuple[float, float]:
        gpu, size = self._gpu, self._config.block
        with gpu.managed(size) as block:
            fresh = gpu.seconds(lambda: gpu.prefetch(block, DEVICE))
            fresh += gpu.seconds(lambda: block.tensor.fill_(1.0))
            again = gpu.seconds(lambda: block.tensor.fill_(1.0))
        self._record.add(f"populate and fill {format_bytes(size)}", [1e3 * fresh], "ms")
        self._record.add(f"fill {format_bytes(size)} again", [1e3 * again], "ms")
        return fresh, again

    def host_memory(self) -> None:
        gpu, size = self._gpu, self._config.block
        seen = {"start": rss_bytes()}
        with gpu.managed(size) as block:
            block.tensor.fill_(1.0)
            gpu.settle(block, DEVICE)
            seen["on the device"] = rss_bytes()
            gpu.settle(block, HOST)
            seen["evicted"] = rss_bytes()
            gpu.settle(block, DEVICE)
            seen["fetched"] = rss_bytes()
        seen["freed"] = rss_bytes()
        self._record.details["host_rss_bytes"] = seen
        grown = {name: (count - seen["start"]) / size for name, count in seen.items()}
        self._decide(
            "11",
            "does the host give its memory back?",
            "resident set of the process beyond its start, as a share of the block: "
            + ", ".join(f"{name} {share:.0%}" for name, share in grown.items()),
        )

    def zero_copy(self) -> None:
        gpu, size, rounds = self._gpu, self._config.block, self._config.rounds
        with gpu.managed(size) as block:
            block.tensor.fill_(1.0)
            local = gpu.repeat(self._deadline, rounds, block.tensor.sum)
            gpu.advise(block, SET_PREFERRED, HOST)
            gpu.advise(block, SET_ACCESSED_BY, DEVICE)
            gpu.settle(block, HOST)
            remote = gpu.repeat(self._deadline, rounds, block.tensor.sum)
        with gpu.managed(size) as block:
            block.tensor.fill_(1.0)
            gpu.advise(block, SET_ACCESSED_BY, DEVICE)
            gpu.settle(block, HOST)
            evicted = [gpu.seconds(block.tensor.sum) for _ in range(2)]
        for name, values in (("on the device", local), ("in place on the host", remote)):
            rates = [size / value / 1e9 for value in values]
            self._record.add(f"sum of {format_bytes(size)} {name}", rates, "GB/s")
        slow = sorted(remote)[len(remote) // 2]
        stays = evicted[1] > slow / 2
        self._record.details["evicted_accessed_by_seconds"] = evicted
        self._decide(
            "12",
            "how fast is reading the host's memory in place?",
            f"{size / slow / 1e9:.1f} GB/s; an evicted block with only accessed-by "
            + ("stays on the host when it is read" if stays else "comes back when it is read"),
        )

    def in_place(self) -> None:
        """Time operators on a matrix that is on the device, brought by faults, used on the host.

        umem does the last with what does not fit beside an operator (docs/decisions/0018). Nothing
        is oversubscribed: the faults here come once, where memory is short they come again.
        """
        gpu, size, words = self._gpu, self._config.block, []
        side = math.isqrt(size // 4) // 512 * 512
        with gpu.managed(size) as block:
            matrix = block.tensor[: side * side].view(side, side)
            other = gpu.torch.ones(side, side, device="cuda")
            out = gpu.torch.empty_like(other)
            uses: dict[str, Callable[[], object]] = {
                "each float once": lambda: gpu.torch.add(matrix, other, out=out),
                "sums of columns": lambda: matrix.sum(0),
                "a transposed copy": lambda: out.copy_(matrix.t()),
                "a product": lambda: gpu.torch.mm(matrix, other, out=out),
            }
            for name, use in uses.items():
                medians = []
                for way in ("on the device", "by faults", "in place"):
                    values = self._seconds_of(use, block, way)
                    spread = self._record.add(f"{name}, {way}", [1e3 * v for v in values], "ms")
                    medians.append(spread.median)
                here, faults, there = medians
                words.append(f"{name} {faults / here:.1f}x and {there / here:.1f}x")
        self._decide(
            "12 op",
            "which operators suffer from it more than from faults?",
            "of the time on the device, by faults and in place: " + ", ".join(words),
        )

    def _seconds_of(self, use: Callable[[], object], block: Block, way: str) -> list[float]:
        gpu = self._gpu
        block.tensor.fill_(1.0)
        if way == "in place":
            gpu.advise(block, SET_PREFERRED, HOST)
            gpu.advise(block, SET_ACCESSED_BY, DEVICE)
        place = DEVICE if way == "on the device" else HOST
        try:
            return gpu.repeat(
                self._deadline, self._config.rounds, use, lambda: gpu.settle(block, place)
            )
        finally:
            if way == "in place":
                gpu.advise(block, UNSET_ACCESSED_BY, DEVICE)
                gpu.advise(block, UNSET_PREFERRED, HOST)

    def faults(self) -> None:
        gpu, size = self._gpu, self._config.block
        order = gpu.torch.randperm(size // PAGE).to("cuda")
        medians: dict[str, float] = {}
        with gpu.managed(size) as block:
            pages = block.tensor.view(-1, FLOATS_A_PAGE)
            touches: dict[str, Callable[[], object]] = {
                "whole pages in order": lambda: block.tensor.mul_(1.0),
                "one float a page, in order": lambda: pages[:, :1].mul_(1.0),
                "one float a page, at random": lambda: pages[:, 0].index_add_(
                    0, order, gpu.torch.ones(len(order), device="cuda")
                ),
            }
            for name, touch in touches.items():
                values = gpu.repeat(
                    self._deadline, self._config.rounds, touch, lambda: self._away(block)
                )
                each = [1e6 * value / (size // PAGE) for value in values]
                medians[name] = self._record.add(f"faults in, {name}, a page", each, "us").median
        first = self._fresh_faults()
        self._record.add("first touch of a page by fault", first, "us")
        bandwidth = PAGE / (medians["whole pages in order"] / 1e6) / 1e9
        self._decide(
            "14",
            "what does a page fault cost?",
            f"faulting whole pages in brings {bandwidth:.1f} GB/s; "
            + ", ".join(f"{name}: {value:.0f} us a page" for name, value in medians.items()),
        )

    def _away(self, block: Block) -> None:
        self._gpu.settle(block, DEVICE)
        block.tensor.fill_(1.0)
        self._gpu.settle(block, HOST)

    def _fresh_faults(self) -> list[float]:
        gpu, size, values = self._gpu, self._config.block, []
        for _ in self._deadline.rounds(min(self._config.rounds, 3)):
            with gpu.managed(size) as block:
                values.append(
                    1e6 * gpu.seconds(lambda b=block: b.tensor.fill_(1.0)) / (size // PAGE)
                )
        return values

    def hints(self) -> None:
        """Kernels of one thread block each, with and without a prefetch of resident memory."""
        gpu = self._gpu
        x = gpu.torch.ones(256, device="cuda")
        with gpu.managed(self._config.block) as block:
            gpu.settle(block, DEVICE)
            page = block.part(0, PAGE)

            def kernels() -> None:
                for _ in range(GAP_KERNELS):
                    x.mul_(1.0)

            def hinted() -> None:
                for _ in range(GAP_KERNELS):
                    gpu.prefetch(page, DEVICE)
                    x.mul_(1.0)

            spreads = {}
            for name, action in (("plain", kernels), ("with a prefetch each", hinted)):
                values = gpu.repeat(self._deadline, self._config.rounds, action)
                each = [1e6 * value / GAP_KERNELS for value in values]
                spreads[name] = self._record.add(f"kernel to kernel, {name}", each, "us").median
        cost = spreads["with a prefetch each"] - spreads["plain"]
        self._decide(
            "21",
            "what does a hint cost between two kernels?",
            f"a prefetch of one resident page adds {cost:.1f} us to a kernel's own "
            f"{spreads['plain']:.1f} us",
        )


def rss_bytes(path: Path = Path("/proc/self/status")) -> int:
    """Return the resident set size of this process."""
    for row in path.read_text(encoding="ascii").splitlines():
        if row.startswith("VmRSS:"):
            return int(row.split()[1]) * 1024
    raise RuntimeError(f"{path} says nothing about VmRSS")
