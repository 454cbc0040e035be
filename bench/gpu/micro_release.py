"""Ways to give device memory back: discard, free, and the ways out; and what the driver shows."""

from __future__ import annotations

from collections.abc import Callable

from gpu.config import Config
from gpu.deadline import Deadline
from gpu.device import ATTACH_GLOBAL, DEVICE, HOST, Gpu, elapsed
from gpu.micro import Micro
from gpu.record import Item, Record, take
from umem.base.units import format_bytes

COST = "what do a discard and a free cost?"
WAYS = "which way out is the fastest?"
SHOWN = "what does cuMemGetInfo show as free?"
NO_PULSE = (
    "an allocation of all free memory (umem.sleep's) is not made: it would break the bench's limit"
)


def run(gpu: Gpu, record: Record, config: Config, deadline: Deadline) -> None:
    """Fill the record."""
    bench = _Release(gpu, record, config, deadline)
    items = [
        Item("10 release", COST, bench.costs),
        Item("4 ways out", WAYS, bench.ways_out),
        Item("24", SHOWN, bench.shown_free),
    ]
    take(record, items, deadline)


class _Release(Micro):
    def __init__(self, gpu: Gpu, record: Record, config: Config, deadline: Deadline) -> None:
        super().__init__(gpu, record, config, deadline)
        self._kernel = gpu.spin(config.kernel_ms)

    def costs(self) -> None:
        """Time both on an idle device and behind a running kernel."""
        words = []
        for size in self._config.alloc_sizes:
            if size > self._gpu.guard.room:
                continue
            words += [self._discard(size), self._free(size)]
        self._decide(
            "10 release",
            COST,
            f"with a kernel of {self._config.kernel_ms:g} ms: {'; '.join(words)}",
        )

    def _discard(self, size: int) -> str:
        gpu, name = self._gpu, f"discard of {format_bytes(size)}"
        with gpu.managed(size) as block:

            def fill() -> None:
                gpu.settle(block, DEVICE)
                block.tensor.fill_(1.0)
                gpu.sync()

            def behind() -> tuple[float, float]:
                fill()
                took = gpu.after_kernel(
                    self._kernel, gpu.side, lambda lane: gpu.discard([block], lane)
                )
                return took.call, took.done

            idle = gpu.repeat(
                self._deadline, self._config.rounds, lambda: gpu.discard([block]), fill
            )
            pairs = [behind() for _ in self._deadline.rounds(self._config.rounds)]
        whole = self._add_us(f"{name}, idle", idle)
        call = self._add_us(f"call of a {name}, busy", [call for call, _ in pairs])
        done = self._add_us(f"{name}, after a kernel", [done for _, done in pairs])
        return (
            f"{name}: {whole:.0f} us idle; after the kernel its call takes {call:.0f} us and its "
            f"stream {done:.0f} us"
        )

    def _free(self, size: int) -> str:
        gpu, name = self._gpu, f"cuMemFree of {format_bytes(size)}"

        def free(busy: bool) -> float:
            with gpu.guard.share(size, "an allocation to free"):
                ptr = gpu.call("cuMemAllocManaged", size, ATTACH_GLOBAL)
                gpu.call("cuMemPrefetchAsync", ptr, size, DEVICE, 0, gpu.lane)
                gpu.sync()
                if busy:
                    self._kernel()
                took = elapsed(lambda: gpu.call("cuMemFree", ptr))
                gpu.sync()
            return took

        idle = self._add_us(f"{name}, idle", self._rounds(lambda: free(busy=False)))
        busy = self._add_us(f"{name}, busy", self._rounds(lambda: free(busy=True)))
        return f"{name}: {idle:.0f} us idle, {busy:.0f} us beside the kernel"

    def ways_out(self) -> None:
        """Migrate: prefetch to the host. Stage: copy to other memory of the host, then discard."""
        gpu, torch, size = self._gpu, self._gpu.torch, self._config.block
        pinned = torch.empty(size // 4, dtype=torch.float32, pin_memory=True)
        pageable = torch.ones(size // 4, dtype=torch.float32)
        home = torch.cuda.current_stream
        took: dict[str, float] = {}
        with gpu.managed(size) as block:
            block.tensor.fill_(1.0)

            def stage(host: object) -> Callable[[], None]:
                def action() -> None:
                    host.copy_(block.tensor, non_blocking=True)  # type: ignore[attr-defined]
                    gpu.side.wait_stream(home())
                    gpu.discard([block])

                return action

            def fetch(host: object) -> Callable[[], None]:
                def action() -> None:
                    gpu.renew([block])
                    home().wait_stream(gpu.side)
                    block.tensor.copy_(host, non_blocking=True)

                return action

            cases: dict[str, tuple[Callable[[], object], tuple[int, int]]] = {
                "migrate out": (lambda: gpu.prefetch(block, HOST), DEVICE),
                "stage in pinned memory, out": (stage(pinned), DEVICE),
                "stage in pageable memory, out": (stage(pageable), DEVICE),
                "migrate in": (lambda: gpu.prefetch(block, DEVICE), HOST),
                "stage in pinned memory, in": (fetch(pinned), HOST),
            }
            for name, (action, start) in cases.items():
                took[name] = self._milliseconds(
                    f"{name}, {format_bytes(size)}",
                    action,
                    lambda start=start: gpu.settle(block, start),  # type: ignore[misc]
                )
        words = [f"{name}: {size / ms / 1e6:.1f} GB/s" for name, ms in took.items()]
        self._decide("4 ways out", WAYS, "; ".join(words))

    def shown_free(self) -> None:
        """Ask after each way to give memory back. The rest of the device's memory stays free."""
        gpu, size = self._gpu, self._config.block
        start = gpu.free_bytes()
        free: dict[str, int] = {}
        with gpu.managed(size) as block:
            block.tensor.fill_(1.0)
            gpu.settle(block, DEVICE)
            free["on the device"] = gpu.free_bytes()
            gpu.settle(block, HOST)
            free["after a prefetch to the host"] = gpu.free_bytes()
            gpu.settle(block, DEVICE)
            gpu.discard([block])
            gpu.sync()
            free["after a discard"] = gpu.free_bytes()
        free["after cuMemFree"] = gpu.free_bytes()
        self._record.details["taken_bytes"] = {name: start - now for name, now in free.items()}
        self._record.leave_out("24 pulse", NO_PULSE)
        self._record.decide(
            "24",
            SHOWN,
            f"of a block of {format_bytes(size)} counts as used: "
            + ", ".join(f"{name} {(start - now) / size:.0%}" for name, now in free.items()),
        )
