"""Discards and page faults: what it costs to move dead bytes, and to move none ahead."""

from __future__ import annotations

from functools import partial

from gpu.device import DEVICE, DISCARD, HOST, RENEW, Action, Gpu
from gpu.parts import Bench
from umem.base.units import PAGE_BYTES, format_bytes


def run(bench: Bench) -> None:
    """Fill the record. Its details have `fault_us`: of a 2 MiB page that a kernel brings in."""
    _Contents(bench).take_all()


class _Contents(Gpu):
    def discards(self) -> None:
        """Move out what is live and what is dead; fetch dead bytes, and renew them instead."""
        with self.managed(self.size) as block:
            out, fetch = (partial(self.prefetch, block, place) for place in (HOST, DEVICE))

            def filled(then: Action = lambda: None) -> None:
                self.fill(block)
                then()

            dead = partial(filled, partial(self.batch, DISCARD, block))
            away = partial(filled, partial(self.settle, block, HOST))
            cases: dict[str, tuple[Action, Action]] = {
                "out, live": (out, filled),
                "out, discarded": (out, dead),
                "in, fetched": (fetch, away),
                "in, renewed": (partial(self.batch, RENEW, block), away),
            }
            for name, (action, before) in cases.items():
                label = f"{name}, {format_bytes(self.size)}"
                self.add(label, self.timed(action, before), "ms")

    def faults(self) -> None:
        """Let kernels bring pages from the host: whole pages, one float of each, new memory."""
        pages = self.size // PAGE_BYTES
        with self.managed(self.size) as block:
            firsts = block.tensor.view(pages, -1)[:, :1]
            for name, tensor in (("whole pages", block.tensor), ("a float of each page", firsts)):
                seconds = self.timed(partial(tensor.mul_, 1.0), partial(self.settle, block, HOST))
                each = [value / pages for value in seconds]
                median = self.add(f"faults in, {name}, a page", each, "us")
                self.record.details.setdefault("fault_us", median)

        def fresh() -> float:
            with self.managed(self.size, filled=False) as new:
                return self.seconds(partial(new.tensor.fill_, 1.0)) / pages

        self.add("first touch of new memory, a page", self.rounds(fresh), "us")
