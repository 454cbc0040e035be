"""Prefetches as umem's engine makes them: on lanes that wait for kernels, several at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import product
from typing import Any

from gpu.config import Config
from gpu.deadline import Deadline
from gpu.device import (
    ATTACH_GLOBAL,
    DEVICE,
    HOST,
    SET_READ_MOSTLY,
    UNSET_READ_MOSTLY,
    Block,
    Gpu,
    elapsed,
    whole_pages,
)
from gpu.micro import Micro
from gpu.record import Item, Record, take
from umem.base.units import MIB, format_bytes

PAGE = 2 * MIB
SHORT_MS = 1.0  # of a kernel that ends while a long transfer is under way
PAUSE = 5e-4  # seconds between calls that are timed while bytes leave
Action = Callable[[int], object]  # gets a stream's handle


@dataclass(frozen=True)
class Verb:
    """A move of the engine: how its block is prepared, and the call."""

    prepare: Callable[[], object]
    move: Action


def run(gpu: Gpu, record: Record, config: Config, deadline: Deadline) -> None:
    """Fill the record."""
    bench = _Lanes(gpu, record, config, deadline)
    items = [
        Item("5 busy", "does a prefetch behind a kernel block its caller?", bench.busy),
        Item("15 lanes", "do the three lanes overlap?", bench.lanes),
        Item("15 queue", "does a small fetch wait for a large way out?", bench.queue),
        Item("22", "how long does compute stand still for a populate?", bench.bubble),
        Item("23", "which calls wait for a way out that is under way?", bench.waiting_calls),
    ]
    take(record, items, deadline)


class _Lanes(Micro):
    def __init__(self, gpu: Gpu, record: Record, config: Config, deadline: Deadline) -> None:
        super().__init__(gpu, record, config, deadline)
        stream = gpu.torch.cuda.Stream
        self._lanes: dict[str, Any] = {name: stream() for name in ("in", "out", "populate")}
        self._kernel = gpu.spin(config.kernel_ms)

    def _verbs(self, block: Block) -> dict[str, Verb]:
        """Return the moves of the lanes of these names."""
        gpu = self._gpu

        def dead() -> None:
            gpu.settle(block, DEVICE)
            gpu.discard([block])
            gpu.sync()

        return {
            "in": Verb(
                lambda: gpu.settle(block, HOST), lambda lane: gpu.prefetch(block, DEVICE, lane)
            ),
            "out": Verb(
                lambda: gpu.settle(block, DEVICE), lambda lane: gpu.prefetch(block, HOST, lane)
            ),
            "populate": Verb(dead, lambda lane: gpu.renew([block], lane)),
        }

    def busy(self) -> None:
        """Time the calls on an idle stream, and on one that waits for a running kernel."""
        gpu, words = self._gpu, []
        with gpu.managed(self._config.block) as block:
            block.tensor.fill_(1.0)
            for name, verb in self._verbs(block).items():
                lane, size = self._lanes[name], format_bytes(block.nbytes)

                def idle(verb: Verb = verb, lane: Any = lane) -> float:
                    verb.prepare()
                    return gpu.call_seconds(lambda: verb.move(int(lane.cuda_stream)))[0]

                def behind(verb: Verb = verb, lane: Any = lane) -> float:
                    verb.prepare()
                    return gpu.after_kernel(self._kernel, lane, verb.move).call

                alone = self._add_us(f"call of {name}, {size}, idle stream", self._rounds(idle))
                call = self._add_us(f"call of {name}, {size}, busy stream", self._rounds(behind))
                blocks = call - alone > 1e3 * self._config.kernel_ms / 2
                words.append(
                    f"{name}: the call takes {call:.0f} us behind a kernel of "
                    f"{self._config.kernel_ms:g} ms, {alone:.0f} us on an idle stream, so it "
                    + ("WAITS for the kernel" if blocks else "does not wait for the kernel")
                )
        self._decide(
            "5 busy", "does a prefetch behind a kernel block its caller?", "; ".join(words)
        )

    def lanes(self) -> None:
        """Time each lane alone and all three at once, all behind the same kernel."""
        gpu, alone, together = self._gpu, {}, []
        with (
            gpu.threads(1) as thread,
            gpu.managed(self._config.block) as first,
            gpu.managed(self._config.block) as second,
            gpu.managed(self._config.block) as third,
        ):
            verbs = {
                name: self._verbs(block)[name]
                for name, block in zip(self._lanes, (first, second, third), strict=True)
            }
            for block in (first, second, third):
                block.tensor.fill_(1.0)
            for name, verb in verbs.items():

                def one(name: str = name, verb: Verb = verb) -> float:
                    verb.prepare()
                    return gpu.after_kernel(self._kernel, self._lanes[name], verb.move).done

                alone[name] = self._add_ms(f"lanes: {name} alone", self._rounds(one))

            def all_of_them() -> float:
                for verb in verbs.values():
                    verb.prepare()
                return self._at_once(verbs, thread)

            together = self._rounds(all_of_them)
        took = self._add_ms("lanes: all three at once", together)
        one_by_one, best = sum(alone.values()), max(alone.values())
        self._decide(
            "15 lanes",
            "do the three lanes overlap?",
            f"all three take {took:.2f} ms, the longest alone {best:.2f} ms, one after another "
            f"{one_by_one:.2f} ms: {(one_by_one - took) / (one_by_one - best):.0%} of what could "
            "overlap does",
        )

    def _at_once(self, verbs: dict[str, Verb], thread: Any) -> float:
        """Start all lanes behind one kernel, the way out by a thread, as the engine does.

        Returns the seconds from the kernel's end until the last lane was done.
        """
        torch, home = self._gpu.torch, self._gpu.torch.cuda.current_stream()
        end = torch.cuda.Event(enable_timing=True)
        done = {name: torch.cuda.Event(enable_timing=True) for name in verbs}
        self._kernel()
        end.record(home)

        def start(name: str) -> None:
            lane = self._lanes[name]
            lane.wait_event(end)
            verbs[name].move(int(lane.cuda_stream))
            done[name].record(lane)

        leaving = thread.submit(start, "out")
        start("in")
        start("populate")
        leaving.result()
        self._gpu.sync()
        return max(float(end.elapsed_time(event)) for event in done.values()) / 1e3

    def queue(self) -> None:
        """Time a small fetch behind a short kernel, alone and while much is on its way out."""
        gpu, kernel = self._gpu, self._gpu.spin(SHORT_MS)
        with (
            gpu.threads(1) as thread,
            gpu.managed(PAGE) as small,
            gpu.managed(self._large()) as large,
        ):
            for block in (small, large):
                block.tensor.fill_(1.0)
            verb = self._verbs(small)["in"]

            def alone() -> float:
                verb.prepare()
                return gpu.after_kernel(kernel, self._lanes["in"], verb.move).done

            def beside() -> float:
                verb.prepare()
                moving = self._leaving(large, thread)
                took = gpu.after_kernel(kernel, self._lanes["in"], verb.move).done
                moving.result()
                return took

            label = f"fetch of {format_bytes(PAGE)}"
            quick = self._add_ms(f"{label}, alone", self._rounds(alone))
            slow = self._add_ms(
                f"{label}, {format_bytes(large.nbytes)} on its way out", self._rounds(beside)
            )
        self._decide(
            "15 queue",
            "does a small fetch wait for a large way out?",
            f"{quick:.2f} ms alone, {slow:.2f} ms while {format_bytes(large.nbytes)} leave",
        )

    def _large(self) -> int:
        """Bytes that take a while to leave."""
        return whole_pages(min(4 * self._config.block, self._gpu.guard.room / 2))

    def _leaving(self, block: Block, thread: Any) -> Future[None]:
        """Start moving a block out by a thread, and return a moment later."""
        gpu, lane = self._gpu, int(self._lanes["out"].cuda_stream)
        gpu.settle(block, DEVICE)
        moving: Future[None] = thread.submit(gpu.prefetch, block, HOST, lane)
        time.sleep(SHORT_MS / 1e3)
        return moving

    def bubble(self) -> None:
        """Compare populates by what the stream of the kernels loses to them."""
        gpu, lane, words = self._gpu, self._lanes["populate"], []
        none = self._rounds(
            lambda: gpu.after_kernel(self._kernel, lane, lambda _: None).bubble  # only the events
        )
        self._add_us("bubble of two events", none)
        for size in (PAGE, self._config.pieces[1]):

            def dead(waits: bool, size: int = size) -> float:
                with gpu.managed(size) as block:
                    block.tensor.fill_(1.0)
                    verb = self._verbs(block)["populate"]
                    verb.prepare()
                    return gpu.after_kernel(self._kernel, lane, verb.move, waits).bubble

            def new(waits: bool, size: int = size) -> float:
                with gpu.managed(size) as block:
                    move: Action = lambda lane: gpu.prefetch(block, DEVICE, lane)  # noqa: E731
                    return gpu.after_kernel(self._kernel, lane, move, waits).bubble

            for (name, measure), waits in product((("dead", dead), ("new", new)), (True, False)):
                case = f"{format_bytes(size)} of {name} memory, "
                case += "after the kernel" if waits else "beside the kernel"
                values = self._rounds(lambda m=measure, w=waits: m(w))  # type: ignore[misc]
                words.append(
                    f"{case}: {self._add_us(f'bubble of a populate, {case}', values):.0f} us"
                )
        self._decide("22", "how long does compute stand still for a populate?", "; ".join(words))

    def waiting_calls(self) -> None:
        """Time calls that need the driver's lock of the address space, or the process's."""
        gpu, words = self._gpu, []
        with (
            gpu.threads(1) as thread,
            gpu.managed(self._config.pieces[0]) as advised,
            gpu.managed(self._large()) as large,
        ):
            gpu.settle(advised, DEVICE)
            large.tensor.fill_(1.0)

            def advise() -> None:
                gpu.advise(advised, SET_READ_MOSTLY)
                gpu.advise(advised, UNSET_READ_MOSTLY)

            def allocate() -> None:
                with gpu.guard.share(PAGE, "an allocation to time"):
                    gpu.call("cuMemFree", gpu.call("cuMemAllocManaged", PAGE, ATTACH_GLOBAL))

            calls = {
                f"read-mostly on {format_bytes(advised.nbytes)} and off again": advise,
                f"cuMemAllocManaged and cuMemFree of {format_bytes(PAGE)}": allocate,
            }
            for name, call in calls.items():
                alone = self._add_us(name, self._rounds(lambda call=call: elapsed(call)))  # type: ignore[misc]
                during: list[float] = []
                for _ in self._deadline.rounds(self._config.rounds):
                    moving = self._leaving(large, thread)
                    during.append(elapsed(call))
                    while not moving.done():
                        time.sleep(PAUSE)
                        during.append(elapsed(call))
                    moving.result()
                    gpu.sync()
                beside = self._add_us(f"{name}, while bytes leave", during)
                words.append(
                    f"{name}: {alone:.0f} us, while bytes leave {beside:.0f} us, at most "
                    f"{1e6 * max(during):.0f} us"
                )
        self._decide("23", "which calls wait for a way out that is under way?", "; ".join(words))
