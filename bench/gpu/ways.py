"""How fast bytes leave the device and come back: the first thing to know of a card.

Prefetches in calls of several sizes, on idle lanes and behind a kernel, by one thread or more, with
and without the other direction; pinned copies beside them. Decision 0003 rests on these figures.
"""

from __future__ import annotations

from functools import partial
from itertools import product

from gpu.device import DEVICE, HOST, Block, Gpu, Job, Place
from gpu.parts import Bench
from umem.base.units import format_bytes

OTHER = {DEVICE: HOST, HOST: DEVICE}
NAMES = {HOST: "out", DEVICE: "in"}


def run(bench: Bench) -> None:
    """Fill the record. Its details have `link`: the best GB/s of each way."""
    _Ways(bench).take_all()


class _Ways(Gpu):
    def _keep(self, way: str, label: str, nbytes: int, seconds: list[float]) -> None:
        """Keep a rate, and the best of its way for the profile and the lower bound."""
        rate = self.add(label, seconds, "GB/s", nbytes)
        best = self.record.details.setdefault("link", {})
        best[way] = max(best.get(way, 0.0), rate)

    def _moved(self, *jobs: Job) -> list[float]:
        """Return seconds of the moves, each job on a thread and a lane of its own."""

        def back() -> None:
            for pieces, where in jobs:
                self.move((pieces, OTHER[where]), 0)

        def go() -> None:
            list(self.threads.map(self.move, jobs, range(len(jobs))))

        return self.timed(go, back)

    def pinned(self) -> None:
        """Copy between pinned memory and plain device memory, each way and both at once."""
        start = self.pinned_copies()

        def copy(*ways: str) -> None:
            for way in ways:
                start(way, self.size)

        for name, ways in (("in", ("in",)), ("out", ("out",)), ("both", ("in", "out"))):
            seconds = self.timed(partial(copy, *ways))
            self._keep(f"pinned {name}", f"{name}, pinned copies", len(ways) * self.size, seconds)

    def calls_in_a_row(self) -> None:
        """Move a block in calls of several sizes: by threads, or behind a kernel as the engine."""
        kernel = self.spin(self.config.kernel_ms)

        def behind(pieces: list[Block], where: Place) -> float:
            self.settle(block, OTHER[where])
            return self.after_kernel(kernel, partial(self.move, (pieces, where)))[1]

        with self.managed(self.size) as block:
            for call, (where, name) in product(self.config.calls, NAMES.items()):
                pieces, label = block.pieces(call), f"{name}, calls of {format_bytes(call)}"
                for threads in self.config.threads:
                    seconds = self._moved(*_jobs(pieces, where, threads))
                    self._keep(name, f"{label} by {threads} threads", self.size, seconds)
                seconds = self.rounds(partial(behind, pieces, where))
                self.add(f"{label} behind a kernel", seconds, "GB/s", self.size)

    def both(self) -> None:
        """Move one block out and another in at once, the way out by one thread or more."""
        call = self.config.calls[1]
        with self.managed(self.size) as leaving, self.managed(self.size) as coming:
            for threads in (1, 2, 3):
                jobs = _jobs(leaving.pieces(call), HOST, threads)
                seconds = self._moved(*jobs, (coming.pieces(call), DEVICE))
                label = f"both, calls of {format_bytes(call)}, out by {threads} threads"
                self._keep("both", label, 2 * self.size, seconds)


def _jobs(pieces: list[Block], where: Place, threads: int) -> list[Job]:
    return [(pieces[i::threads], where) for i in range(threads)]
