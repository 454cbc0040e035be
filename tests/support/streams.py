"""Random programs over several streams that wait where they must: wrong bytes are umem's doing."""

from __future__ import annotations

import random

import torch

import umem
from support.cells import Cell

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 300 * KIB, 2 * MIB, 3 * MIB, 6 * MIB)
PER_THREAD = 2  # the handle of the calling thread's own default stream


def all_streams() -> list[torch.cuda.Stream]:
    """The legacy stream, the per-thread one, and two of the program's own."""
    return [
        torch.cuda.default_stream(),
        torch.cuda.ExternalStream(PER_THREAD),
        torch.cuda.Stream(),
        torch.cuda.Stream(priority=-1),
    ]


class Used(Cell):
    """A cell, and which streams have work on it."""

    def __init__(self, nbytes: int, home: torch.cuda.Stream) -> None:
        super().__init__(nbytes)
        self.home = self.writer = home
        self.readers: list[torch.cuda.Stream] = []


class Program:
    """Allocates, writes, copies, reads and frees at random, with more alive than `budget`."""

    def __init__(self, seed: int, live_bytes: int) -> None:
        self.random = random.Random(seed)
        self.streams = all_streams()
        self.live_bytes = live_bytes
        self.cells: list[Used] = []
        self.wrong: list[str] = []

    def run(self, steps: int) -> list[str]:
        """Describe the errors of all cells; empty if there are none."""
        actions = [self.allocate, self.fill, self.copy, self.free, self.hint, self.check]
        actions += [self.pass_on] * 3
        for _ in range(steps):
            action = self.random.choice(actions)
            stream = self.random.choice(self.streams)
            with torch.cuda.stream(stream):
                if not self.cells or action == self.allocate:
                    self.allocate(stream)
                else:
                    action(stream)
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)
        for cell in self.cells:
            self.note(cell)
        return self.wrong

    def allocate(self, stream: torch.cuda.Stream) -> None:
        size = self.random.choice(SIZES)
        while self.cells and sum(c.tensor.nbytes for c in self.cells) + size > self.live_bytes:
            self.free(stream)
        self.cells.append(Used(size, stream))
        self.cells[-1].fill()

    def fill(self, stream: torch.cuda.Stream) -> None:
        cell = self.random.choice(self.cells)
        self.before_write(cell, stream)
        cell.fill()

    def copy(self, stream: torch.cuda.Stream) -> None:
        target = self.random.choice(self.cells)
        alike = [c for c in self.cells if c.tensor.nbytes == target.tensor.nbytes]
        source = self.random.choice(alike)
        if source is not target:
            self.before_read(source, stream)
            self.before_write(target, stream)
            target.copy(source)

    def pass_on(self, stream: torch.cuda.Stream) -> None:
        """A block that its owner releases while another stream must still read it."""
        target = self.random.choice(self.cells)
        source = Used(target.tensor.nbytes, stream)
        source.fill()
        reader = self.random.choice(self.streams)
        with torch.cuda.stream(reader):
            self.before_read(source, reader)
            self.before_write(target, reader)
            target.copy(source)
        del source
        again = Used(target.tensor.nbytes, stream)  # at the same address, without protection
        again.fill()
        self.cells[self.random.randrange(len(self.cells))] = again

    def free(self, _: torch.cuda.Stream) -> None:
        self.cells.pop(self.random.randrange(len(self.cells)))

    def hint(self, _: torch.cuda.Stream) -> None:
        tensor = self.random.choice(self.cells).tensor
        self.random.choice([umem.evict, umem.prefetch])(tensor)

    def check(self, stream: torch.cuda.Stream) -> None:
        cell = self.random.choice(self.cells)
        self.before_read(cell, stream)
        self.note(cell)

    def note(self, cell: Used) -> None:
        if wrong := cell.wrong():
            self.wrong.append(wrong)

    def before_read(self, cell: Used, stream: torch.cuda.Stream) -> None:
        self.use(cell, stream, [cell.writer])
        cell.readers.append(stream)

    def before_write(self, cell: Used, stream: torch.cuda.Stream) -> None:
        self.use(cell, stream, [cell.writer, *cell.readers])
        cell.writer, cell.readers = stream, []

    def use(self, cell: Used, stream: torch.cuda.Stream, after: list[torch.cuda.Stream]) -> None:
        for other in after:
            if other != stream:
                stream.wait_stream(other)
        if stream != cell.home:
            cell.tensor.record_stream(stream)
