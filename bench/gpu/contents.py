"""Tests of contents: discards, read-mostly copies, page faults, and memory in use."""

from __future__ import annotations

from functools import partial

from gpu.device import DEVICE, DISCARD, HOST, RENEW, Action, Advice, Gpu
from gpu.parts import Bench
from umem.base import host
from umem.base.units import PAGE_BYTES


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
            self.compare(block, "ms", cases)

    def revival(self) -> None:
        """Discard, write by a kernel without a prefetch, move out, read: what is left of it."""
        with self.managed(self.size) as block:
            self.batch(DISCARD, block)
            self.sync()
            block.tensor.fill_(2.0)
            self.sync()
            self.settle(block, HOST)
            kept = block.tensor.cpu().view(self.size // PAGE_BYTES, -1).eq(2.0).all(1)
            share = 100 * float(kept.float().mean())
            self.record.add("pages that kept a write after a discard", [share], "%")

    def read_mostly(self) -> None:
        """Time the copy to the host ahead, the drop of the device's, and the next write there.

        Pages stay read-only once read-mostly ends. In the driver's source a prefetch does not
        change that, and setting accessed-by does: the write then takes no fault.
        """
        with self.managed(self.size) as block:
            advise, write = partial(self.advise, block), partial(block.tensor.fill_, 2.0)
            mark = partial(advise, Advice.SET_READ_MOSTLY)
            end = partial(advise, Advice.UNSET_READ_MOSTLY)
            upgrade = partial(advise, Advice.SET_ACCESSED_BY, Advice.UNSET_ACCESSED_BY)
            fetch = partial(self.settle, block, DEVICE)

            def plain() -> None:
                advise(Advice.UNSET_READ_MOSTLY, Advice.UNSET_PREFERRED)
                self.fill(block)

            def copied(*then: Action) -> None:
                plain()
                mark()
                self.settle(block, HOST)
                for action in then:
                    action()

            def drop() -> None:
                advise(Advice.SET_PREFERRED, where=HOST)
                end()

            cases: dict[str, tuple[Action, Action]] = {
                "read-mostly set": (mark, plain),
                "the device's copy dropped": (drop, copied),
                "a write": (write, plain),
                "a write after read-mostly": (write, partial(copied, end)),
                "a write after read-mostly and a prefetch": (write, partial(copied, end, fetch)),
                "a write after read-mostly and accessed-by": (write, partial(copied, end, upgrade)),
            }
            self.compare(block, "us", cases)

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

    def memory(self) -> None:
        """Show what host and device have in use after each step of a block's life."""

        def keep(when: str) -> None:
            used = {"device": device - self.free_bytes(), "host": available - _available()}
            for name, now in used.items():
                self.record.add(f"{name} memory in use {when}", [100 * now / self.size], "%")

        device, available = self.free_bytes(), _available()
        with self.managed(self.size) as block:
            keep("with a block on the device, of the block")
            self.settle(block, HOST)
            keep("after a prefetch to the host")
            self.settle(block, DEVICE)
            keep("back on the device")
            self.batch(DISCARD, block)
            self.sync()
            keep("after a discard")
        keep("after cuMemFree")


def _available() -> int:
    return host.meminfo("MemAvailable") or 0
