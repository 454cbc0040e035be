"""[O] What happens beyond the device's memory. Only on a card of one's own, and only when asked:
real oversubscription can hang a GPU.

Plain device memory takes all but a small window first, so that little managed memory is enough to
oversubscribe: the guard's limit holds here too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gpu.config import Config
from gpu.deadline import Deadline
from gpu.device import DEVICE, Gpu, whole_pages
from gpu.micro import Micro
from gpu.record import Item, Record, take
from umem.base.units import MIB, format_bytes

PAGE = 2 * MIB
TIMES = (1.2, 2.0, 4.0)  # of the window


def run(gpu: Gpu, record: Record, config: Config, deadline: Deadline) -> None:
    """Fill the record."""
    bench = _Beyond(gpu, record, config, deadline)
    items = [
        Item("6", "does a prefetch of a resident block spare it?", bench.refresh),
        Item("14 [O]", "what does a fault cost beyond capacity?", bench.faults),
        Item("16", "does cudaMalloc work while managed memory fills the device?", bench.malloc),
    ]
    take(record, items, deadline)


class _Beyond(Micro):
    def __init__(self, gpu: Gpu, record: Record, config: Config, deadline: Deadline) -> None:
        super().__init__(gpu, record, config, deadline)
        self._window = whole_pages(gpu.guard.limit / (max(TIMES) + 1))

    @contextlib.contextmanager
    def _only_a_window(self) -> Iterator[int]:
        """Bytes that stay free on the device for the length of a block."""
        gpu = self._gpu
        gpu.torch.cuda.empty_cache()
        ballast = gpu.call("cuMemAlloc", whole_pages(gpu.free_bytes() - self._window))
        try:
            yield gpu.free_bytes()
        finally:
            gpu.sync()
            gpu.call("cuMemFree", ballast)

    def refresh(self) -> None:
        """Fill the window, prefetch the oldest block again, and see whom the next one evicts."""
        gpu = self._gpu
        with self._only_a_window() as window:
            size = whole_pages(window / 8)
            with contextlib.ExitStack() as stack:
                blocks = [stack.enter_context(gpu.managed(size)) for _ in range(9)]
                for block in blocks[:8]:
                    gpu.settle(block, DEVICE)
                    block.tensor.fill_(1.0)
                gpu.settle(blocks[0], DEVICE)
                gpu.settle(blocks[8], DEVICE)
                seconds = [gpu.seconds(block.tensor.sum) for block in blocks[:2]]
        self._record.details["refresh_seconds"] = seconds
        spared = seconds[0] < seconds[1] / 2
        self._decide(
            "6",
            "does a prefetch of a resident block spare it?",
            f"reading the refreshed block takes {seconds[0] / seconds[1]:.2f}x of its neighbour: "
            + ("it was spared" if spared else "it was not: evict explicitly"),
        )

    def faults(self) -> None:
        gpu, words = self._gpu, []
        for times in TIMES:
            with self._only_a_window() as window:
                size = whole_pages(times * window)
                if size > gpu.guard.room:
                    words.append(f"{times:g}x: more than the guard allows")
                    continue
                with gpu.managed(size) as block:
                    block.tensor.fill_(1.0)
                    values = gpu.repeat(
                        self._deadline,
                        2,
                        lambda b=block: b.tensor.mul_(1.0),  # type: ignore[misc]
                    )
            each = [1e6 * value / (size // PAGE) for value in values]
            spread = self._record.add(f"faults over {times:g}x of capacity, a page", each, "us")
            words.append(f"{times:g}x: {spread.median:.0f} us a page")
        self._decide("14 [O]", "what does a fault cost beyond capacity?", "; ".join(words))

    def malloc(self) -> None:
        gpu = self._gpu
        with self._only_a_window() as window, gpu.managed(whole_pages(window)) as block:
            gpu.settle(block, DEVICE)
            block.tensor.fill_(1.0)
            size = whole_pages(window / 4)
            code, ptr = gpu.calls.cuMemAlloc(size)
            if code == 0:
                gpu.call("cuMemFree", ptr)
        self._decide(
            "16",
            "does cudaMalloc work while managed memory fills the device?",
            f"{format_bytes(size)}: " + ("yes" if code == 0 else f"no, CUresult {code}"),
        )
