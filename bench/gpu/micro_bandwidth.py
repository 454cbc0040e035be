"""Transfer bandwidth: prefetch and pinned copies, in one call, in batches, in pieces."""

from __future__ import annotations

import statistics

from gpu.config import Config
from gpu.deadline import Deadline
from gpu.device import DEVICE, HOST, Block, Gpu
from gpu.micro import Micro
from gpu.record import Item, Record, take
from umem.base.units import MIB, format_bytes

PAGE = 2 * MIB
Measured = dict[tuple[str, int], list[float]]  # (way, bytes): seconds


def run(gpu: Gpu, record: Record, config: Config, deadline: Deadline) -> None:
    """Fill the record. Its details have `bandwidth`: bytes a second, `in` and `out`."""
    bench = _Bandwidth(gpu, record, config, deadline)
    items = [
        Item("4", "is prefetch as fast as a pinned copy?", bench.copies),
        Item("4 batch", "one batch call, or a loop of single ones?", bench.batches),
        Item("4 pieces", "how large may a piece be?", bench.pieces),
    ]
    take(record, items, deadline)


class _Bandwidth(Micro):
    def copies(self) -> None:
        room = self._gpu.guard.room
        sizes = [size for size in self._config.copy_sizes if 2 * size <= room]
        measured: Measured = {}
        for size in sizes:
            self._copies_of(size, measured)
        for (way, size), seconds in measured.items():
            rates = [size / one / 1e9 for one in seconds]
            self._record.add(f"{way}, {format_bytes(size)}", rates, "GB/s")
        models = {way: line(way, measured) for way in dict.fromkeys(way for way, _ in measured)}
        self._record.details["rates"] = {
            way: [
                (size, size / statistics.median(seconds) / 1e9)
                for (name, size), seconds in measured.items()
                if name == way
            ]
            for way in models
        }
        best = {
            direction: max(
                size / statistics.median(seconds)
                for (way, size), seconds in measured.items()
                if way.endswith(direction)
            )
            for direction in ("in", "out")
        }
        self._record.details["lane_model"] = {
            way: {"seconds": a, "seconds_a_byte": b} for way, (a, b) in models.items()
        }
        self._record.details["bandwidth"] = best
        self._decide("4", "is prefetch as fast as a pinned copy?", self._compare(measured))

    def _copies_of(self, size: int, measured: Measured) -> None:
        deadline = self._deadline.within(self._deadline.left / 3)
        for way, values in {**self._pinned(size, deadline), **self._moves(size, deadline)}.items():
            measured[way, size] = values

    def _pinned(self, size: int, deadline: Deadline) -> dict[str, list[float]]:
        repeat, torch = self._gpu.repeat, self._gpu.torch
        torch.cuda.empty_cache()
        host = torch.empty(size // 4, dtype=torch.float32, pin_memory=True)
        plain = torch.empty(size // 4, dtype=torch.float32, device="cuda")
        rounds = self._config.rounds
        return {
            "pinned copy in": repeat(deadline, rounds, lambda: plain.copy_(host, True)),
            "pinned copy out": repeat(deadline, rounds, lambda: host.copy_(plain, True)),
        }

    def _moves(self, size: int, deadline: Deadline) -> dict[str, list[float]]:
        gpu, rounds = self._gpu, self._config.rounds
        with gpu.managed(size) as block:
            block.tensor.fill_(1.0)

            def go_in() -> None:
                gpu.prefetch(block, DEVICE)

            def go_out() -> None:
                gpu.prefetch(block, HOST)

            return {
                "prefetch in": gpu.repeat(deadline, rounds, go_in, go_out),
                "prefetch out": gpu.repeat(deadline, rounds, go_out, go_in),
            }

    def _compare(self, measured: Measured) -> str:
        largest = max(size for _, size in measured)
        words = []
        for direction in ("in", "out"):
            copy, move = (
                statistics.median(measured[f"{way} {direction}", largest])
                for way in ("pinned copy", "prefetch")
            )
            words.append(f"{direction}: prefetch has {copy / move:.0%} of the pinned copy's speed")
        return f"{'; '.join(words)}; at {format_bytes(largest)}"

    def batches(self) -> None:
        gpu, rounds = self._gpu, self._config.rounds
        seconds: dict[str, float] = {}
        with gpu.managed(self._config.block) as block:
            block.tensor.fill_(1.0)
            pages = block.pieces(PAGE)
            for direction, where, other in (("in", DEVICE, HOST), ("out", HOST, DEVICE)):

                def before(other: tuple[int, int] = other) -> None:
                    gpu.settle(block, other)

                def loop(where: tuple[int, int] = where) -> None:
                    for page in pages:
                        gpu.prefetch(page, where)

                def batch(where: tuple[int, int] = where) -> None:
                    gpu.prefetch_all(pages, where)

                for name, action in (("loop", loop), ("batch", batch)):
                    values = gpu.repeat(self._deadline, rounds, action, before)
                    label = f"{format_bytes(block.nbytes)} {direction} in pages, {name}"
                    spread = self._record.add(label, [1e3 * v for v in values], "ms")
                    seconds[f"{name} {direction}"] = spread.median
        words = [
            f"{direction}: batch takes "
            f"{seconds[f'batch {direction}'] / seconds[f'loop {direction}']:.2f}x the loop"
            for direction in ("in", "out")
        ]
        self._decide("4 batch", "one batch call, or a loop of single ones?", "; ".join(words))

    def pieces(self) -> None:
        gpu = self._gpu
        size = min(4 * max(self._config.pieces), gpu.guard.room // PAGE * PAGE)
        outcome: list[tuple[float, int]] = []
        with gpu.managed(size) as block:
            block.tensor.fill_(1.0)
            for piece in self._config.pieces:
                parts = block.pieces(piece)

                def move(parts: list[Block] = parts) -> None:
                    for part in parts:
                        gpu.prefetch(part, DEVICE)

                values = gpu.repeat(
                    self._deadline, self._config.rounds, move, lambda: gpu.settle(block, HOST)
                )
                rates = [size / value / 1e9 for value in values]
                spread = self._record.add(
                    f"prefetch in, pieces of {format_bytes(piece)}", rates, "GB/s"
                )
                outcome.append((spread.median, piece))
        best, piece = max(outcome)
        good = min(piece for rate, piece in outcome if rate >= 0.97 * best)
        self._decide(
            "4 pieces",
            "how large may a piece be?",
            f"{format_bytes(piece)} is the fastest; {format_bytes(good)} is the smallest within "
            "3 % of it",
        )


def line(way: str, measured: Measured) -> tuple[float, float]:
    """Least squares of t = a + b bytes over the medians, each point weighing as much as its
    relative error: (a, b), or (0, t / bytes) of a single size.
    """
    points = [
        (float(size), statistics.median(seconds))
        for (name, size), seconds in measured.items()
        if name == way
    ]
    if len(points) == 1:
        size, seconds = points[0]
        return 0.0, seconds / size
    weights = [1.0 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = (
        sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
        / spread
    )
    return mean_y - slope * mean_x, slope
