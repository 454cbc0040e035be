"""Capabilities of this driver: versions, batch calls, calls under stream capture."""

from __future__ import annotations

from collections.abc import Callable

from gpu import raw
from gpu.config import Config
from gpu.deadline import Deadline
from gpu.device import ATTACH_GLOBAL, DEVICE, HOST, LEGACY_STREAM, Block, Gpu
from gpu.micro import Micro
from gpu.raw import CallError
from gpu.record import Item, Record, take

CONCURRENT_MANAGED_ACCESS, PAGEABLE_ACCESS = 89, 88
BATCH_CALLS = (
    "cuMemPrefetchBatchAsync",
    "cuMemDiscardBatchAsync",
    "cuMemDiscardAndPrefetchBatchAsync",
)


def run(gpu: Gpu, record: Record, config: Config, deadline: Deadline) -> None:
    """Fill the record."""
    gates = _Gates(gpu, record, config, deadline)
    items = [
        Item("1", "which gates are open?", gates.capabilities),
        Item("2", "do batch calls work on a side stream, and on the NULL stream?", gates.batches),
        Item("3", "what may be called while a stream captures?", gates.captures),
    ]
    take(record, items, deadline)


class _Gates(Micro):
    def capabilities(self) -> None:
        gpu = self._gpu
        count = gpu.call("cuDeviceGetCount")
        each = [
            gpu.call("cuDeviceGetAttribute", CONCURRENT_MANAGED_ACCESS, i) for i in range(count)
        ]
        pageable = gpu.call("cuDeviceGetAttribute", PAGEABLE_ACCESS, 0)
        version = gpu.call("cuDriverGetVersion")
        present = {name: raw.has_entry(name, 13000) for name in BATCH_CALLS}
        located = raw.has_entry("cuMemGetLocationInfo", 13040)
        self._record.details["capabilities"] = {
            "devices": count,
            "concurrent_managed_access": each,
            "pageable_memory_access": pageable,
            "driver_version": version,
            "entry_points": {**present, "cuMemGetLocationInfo": located},
        }
        usable = "umem can oversubscribe" if all(each) else "umem falls back to plain device memory"
        self._record.decide(
            "1",
            "which gates are open?",
            f"driver {version}; concurrent managed access on {sum(map(bool, each))} of {count} "
            f"devices: {usable}; batch calls: {_yes_no(all(present.values()))}; residency query: "
            f"{_yes_no(located)}",
        )

    def batches(self) -> None:
        outcomes: dict[str, dict[str, int]] = {}
        with self._gpu.managed(self._config.block) as block:
            self._gpu.settle(block, DEVICE)
            streams = {"side stream": self._gpu.lane, "NULL": 0, "legacy": LEGACY_STREAM}
            for name in BATCH_CALLS:
                outcomes[name] = {
                    where: self._batch(name, block, stream) for where, stream in streams.items()
                }
        self._record.details["batch_codes"] = outcomes
        works = all(codes["side stream"] == 0 for codes in outcomes.values())
        refused = sorted({codes[key] for codes in outcomes.values() for key in ("NULL", "legacy")})
        self._record.decide(
            "2",
            "do batch calls work on a side stream, and on the NULL stream?",
            f"side stream: {_yes_no(works)}; NULL and legacy stream: CUresult {refused}; "
            + ("umem uses them on its lanes" if works else "umem uses single calls"),
        )

    def _batch(self, name: str, block: Block, stream: int) -> int:
        places = () if name == "cuMemDiscardBatchAsync" else ([DEVICE], [0])
        code = self._gpu.code(name, [block.ptr], [block.nbytes], *places, 0, stream)
        self._gpu.sync()
        return code

    def captures(self) -> None:
        gpu = self._gpu
        codes: dict[str, int] = {}
        with gpu.managed(self._config.block) as block:
            gpu.settle(block, DEVICE)
            ptrs, sizes = [block.ptr], [block.nbytes]
            calls: dict[str, Callable[[], int]] = {
                "cuMemPrefetchAsync": lambda: gpu.code(
                    "cuMemPrefetchAsync", block.ptr, block.nbytes, HOST, 0, gpu.lane
                ),
                "cuMemPrefetchBatchAsync": lambda: gpu.code(
                    "cuMemPrefetchBatchAsync", ptrs, sizes, [HOST], [0], 0, gpu.lane
                ),
                "cuMemDiscardBatchAsync": lambda: gpu.code(
                    "cuMemDiscardBatchAsync", ptrs, sizes, 0, gpu.lane
                ),
                "cuMemAllocManaged": self._allocate,
                "managed pool": self._allocate_from_pool,
            }
            for name, call in calls.items():
                with raw.capture(gpu.lane):
                    codes[name] = call()
        self._record.details["capture_codes"] = codes
        words = ", ".join(
            f"{name} {'becomes a node' if code == 0 else code}" for name, code in codes.items()
        )
        self._record.decide(
            "3",
            "what may be called while a stream captures?",
            f"CUresult: {words}; umem makes no driver call while a stream captures",
        )

    def _allocate(self) -> int:
        size = self._config.block
        with self._gpu.guard.share(size, "an allocation under capture"):
            code, ptr = self._gpu.calls.cuMemAllocManaged(size, ATTACH_GLOBAL)
            if code == 0:
                self._gpu.code("cuMemFree", ptr)
            return int(code)

    def _allocate_from_pool(self) -> int:
        size = self._config.block
        with self._gpu.guard.share(size, "a pool's block under capture"):
            try:
                pool = raw.ManagedPool()
                pool.free(pool.allocate(size, self._gpu.lane), self._gpu.lane)
            except CallError as error:
                return error.code
            return 0  # the pool goes with the process: its block belongs to the graph


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"
