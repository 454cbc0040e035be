"""Cost and benefit of discarding, and of read-mostly copies."""

from __future__ import annotations

from gpu.config import Config
from gpu.deadline import Deadline
from gpu.device import (
    DEVICE,
    HOST,
    SET_PREFERRED,
    SET_READ_MOSTLY,
    UNSET_PREFERRED,
    UNSET_READ_MOSTLY,
    Block,
    Gpu,
)
from gpu.micro import Micro
from gpu.record import Item, Record, take
from umem.base.units import KIB, MIB, format_bytes

PAGE = 2 * MIB


def run(gpu: Gpu, record: Record, config: Config, deadline: Deadline) -> None:
    """Fill the record."""
    bench = _Discard(gpu, record, config, deadline)
    items = [
        Item("7", "does discard save the copy?", bench.saves_copies),
        Item("8", "does a plain write revive a discarded page?", bench.revival),
        Item("9", "does discarding part of a page spare the rest?", bench.part_of_a_page),
        Item("7 duplicates", "is dropping a read-mostly copy free?", bench.duplicates),
    ]
    take(record, items, deadline)


class _Discard(Micro):
    def saves_copies(self) -> None:
        gpu, size = self._gpu, self._config.block
        with gpu.managed(size) as block:

            def filled() -> None:
                gpu.settle(block, DEVICE)
                block.tensor.fill_(1.0)

            def discarded() -> None:
                filled()
                gpu.sync()
                gpu.discard([block])

            def away() -> None:
                filled()
                gpu.settle(block, HOST)

            def out() -> None:
                gpu.prefetch(block, HOST)

            name = format_bytes(size)
            live = self._milliseconds(f"prefetch out of {name}, live", out, filled)
            dead = self._milliseconds(f"prefetch out of {name}, discarded", out, discarded)
            fetch = self._milliseconds(
                f"prefetch in of {name}", lambda: gpu.prefetch(block, DEVICE), away
            )
            renew = self._milliseconds(
                f"discard and prefetch of {name} on the host", lambda: gpu.renew([block]), away
            )
        self._decide(
            "7",
            "does discard save the copy?",
            f"a discarded block leaves in {dead / live:.2f}x the time of a live one; renewing a "
            f"dead block takes {renew / fetch:.2f}x the time of fetching it",
        )

    def revival(self) -> None:
        gpu = self._gpu
        with gpu.managed(self._config.block) as block:
            block.tensor.fill_(1.0)
            gpu.sync()
            gpu.discard([block])
            gpu.sync()
            block.tensor.fill_(2.0)  # a kernel's write, with no prefetch before it
            gpu.sync()
            gpu.settle(block, HOST)
            survived = self._share(block, 2.0)
        self._record.details["revived_share"] = survived
        kept = survived == 1.0
        self._record.decide(
            "8",
            "does a plain write revive a discarded page?",
            f"{survived:.0%} of the pages kept what was written after the discard: "
            + ("a write is enough" if kept else "a prefetch has to come before the write"),
        )

    def part_of_a_page(self) -> None:
        gpu = self._gpu
        sizes = (64 * KIB, MIB, PAGE)
        spared: dict[str, bool] = {}
        for size in sizes:
            with gpu.managed(2 * PAGE) as block:
                block.tensor.fill_(3.0)
                gpu.sync()
                gpu.discard([block.part(PAGE // 2, size)])
                gpu.sync()
                gpu.settle(block, HOST)
                rest = self._read(block, 0, PAGE // 2)
                rest += self._read(block, PAGE // 2 + size, PAGE // 2)
                spared[format_bytes(size)] = set(rest) == {3.0}
        self._record.details["neighbours_intact"] = spared
        self._record.decide(
            "9",
            "does discarding part of a page spare the rest?",
            ", ".join(f"{size}: {'yes' if ok else 'NO'}" for size, ok in spared.items())
            + "; umem discards whole pages of 2 MiB only",
        )

    def duplicates(self) -> None:
        """Read-mostly after the last write, prefetch to the host, then drop the device's copy."""
        gpu, size = self._gpu, self._config.block
        name = format_bytes(size)
        with gpu.managed(size) as block:

            def plain() -> None:
                gpu.advise(block, UNSET_READ_MOSTLY)
                gpu.advise(block, UNSET_PREFERRED)
                gpu.settle(block, DEVICE)
                block.tensor.fill_(1.0)

            def marked() -> None:
                plain()
                gpu.sync()
                gpu.advise(block, SET_READ_MOSTLY)

            def doubled() -> None:
                marked()
                gpu.settle(block, HOST)

            def dropped() -> None:
                doubled()
                drop()
                gpu.sync()

            def drop() -> None:
                gpu.advise(block, SET_PREFERRED, HOST)
                gpu.advise(block, UNSET_READ_MOSTLY)

            def out() -> None:
                gpu.prefetch(block, HOST)

            moved = self._milliseconds(f"prefetch out of {name}", out, plain)
            mark = self._milliseconds(
                f"read-mostly set on {name}", lambda: gpu.advise(block, SET_READ_MOSTLY), plain
            )
            copied = self._milliseconds(f"prefetch out of {name}, read-mostly", out, marked)
            dropping = self._milliseconds(f"drop of the device's copy of {name}", drop, doubled)
            back = self._milliseconds(
                f"prefetch in of {name} after the drop",
                lambda: gpu.prefetch(block, DEVICE),
                dropped,
            )
        self._decide(
            "7 duplicates",
            "is dropping a read-mostly copy free?",
            f"the drop takes {dropping / moved:.2f}x of a copy out; setting read-mostly takes "
            f"{mark / moved:.2f}x, the copy then {copied / moved:.2f}x, and the way back "
            f"{back / moved:.2f}x",
        )

    def _share(self, block: Block, value: float) -> float:
        """Return the share of the block's pages that hold `value` at both ends."""
        good = 0
        pages = block.pieces(PAGE)
        for page in pages:
            ends = [self._read(page, 0, 16)[0], self._read(page, page.nbytes - 16, 16)[0]]
            good += ends == [value, value]
        return good / len(pages)

    def _read(self, block: Block, begin: int, nbytes: int) -> list[float]:
        """Return the CPU's view of some floats."""
        data = self._gpu.calls.load(block.ptr + begin, nbytes)
        return list(memoryview(data).cast("f"))
