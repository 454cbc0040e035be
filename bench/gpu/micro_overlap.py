"""Interference of transfers with the calling thread, launches, kernels and the other direction."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpu.config import Config
from gpu.deadline import Deadline
from gpu.device import DEVICE, HOST, Gpu
from gpu.micro import Micro
from gpu.record import Item, Record, take
from umem.base.units import format_bytes

LAUNCHES = 200


def run(gpu: Gpu, record: Record, config: Config, deadline: Deadline) -> None:
    """Fill the record."""
    bench = _Overlap(gpu, record, config, deadline)
    items = [
        Item("5", "does a prefetch to the host block its caller, or launches?", bench.blocking),
        Item("15", "what overlaps?", bench.overlap),
    ]
    take(record, items, deadline)


def hidden_share(one: float, other: float, both: float) -> float:
    """Return the hidden share of the shorter work when both run at once: 1 all of it, 0 nothing."""
    return (one + other - both) / min(one, other)


class _Overlap(Micro):
    def blocking(self) -> None:
        gpu, rounds = self._gpu, self._config.rounds
        shares: dict[str, float] = {}
        with gpu.managed(self._config.block) as block:
            block.tensor.fill_(1.0)
            for name, where, start in (("out", HOST, DEVICE), ("in", DEVICE, HOST)):
                inside, total = [], []
                for _ in self._deadline.rounds(rounds):
                    gpu.settle(block, start)
                    call, whole = gpu.call_seconds(lambda w=where: gpu.prefetch(block, w))
                    inside.append(1e3 * call)
                    total.append(1e3 * whole)
                size = format_bytes(block.nbytes)
                spent = self._record.add(f"call of a prefetch {name} of {size}", inside, "ms")
                whole_ms = self._record.add(f"prefetch {name} of {size}, whole", total, "ms")
                shares[name] = spent.median / whole_ms.median
            quiet = [self._launch_us() for _ in self._deadline.rounds(rounds)]
            beside = []
            with gpu.threads(1) as threads:
                for _ in self._deadline.rounds(rounds):
                    gpu.settle(block, DEVICE)
                    moving = threads.submit(gpu.prefetch, block, HOST)
                    beside.append(self._launch_us())
                    moving.result()
        alone = self._record.add("launch of a kernel", quiet, "us").median
        during = self._record.add(
            "launch of a kernel, prefetch out on a thread", beside, "us"
        ).median
        self._decide(
            "5",
            "does a prefetch to the host block its caller, or launches?",
            f"the caller spends {shares['out']:.0%} of the way out inside the call "
            f"({shares['in']:.0%} of the way in); launches beside a worker's prefetch take "
            f"{during / alone:.2f}x: "
            + (
                "the way out needs a worker thread"
                if shares["out"] > 0.1
                else "no thread is needed"
            ),
        )

    def _launch_us(self) -> float:
        x = self._gpu.torch.ones(256, device="cuda")
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            x.mul_(1.0)
        return 1e6 * (time.perf_counter() - begin) / LAUNCHES

    def overlap(self) -> None:
        gpu = self._gpu
        with gpu.managed(self._config.block) as one, gpu.managed(self._config.block) as two:
            for block in (one, two):
                block.tensor.fill_(1.0)
            second = int(gpu.torch.cuda.Stream().cuda_stream)

            def ready() -> None:
                gpu.settle(one, HOST)
                gpu.settle(two, DEVICE)

            way_in: Callable[[], None] = lambda: gpu.prefetch(one, DEVICE)  # noqa: E731
            way_out: Callable[[], None] = lambda: gpu.prefetch(two, HOST, second)  # noqa: E731
            length = max(
                1e3 * min(gpu.repeat(self._deadline, self._config.rounds, way_in, ready)),
                self._config.kernel_ms,
            )
            actions = {"kernels": gpu.busy(length), "in": way_in, "out": way_out}
            alone = {
                name: self._milliseconds(f"overlap: {name}", action, ready)
                for name, action in actions.items()
            }
            words = []
            for first, other in (("kernels", "in"), ("kernels", "out"), ("in", "out")):

                def both(first: str = first, other: str = other) -> None:
                    actions[first]()
                    actions[other]()

                together = self._milliseconds(f"overlap: {first} and {other}", both, ready)
                hidden = hidden_share(alone[first], alone[other], together)
                words.append(f"{first} and {other}: {hidden:.0%} of the shorter is hidden")
        self._decide("15", "what overlaps?", "; ".join(words))
