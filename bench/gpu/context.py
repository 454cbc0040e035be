"""Context of the parts that train."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from gpu import children
from gpu.children import GpuSpec
from gpu.config import Config
from gpu.deadline import Deadline
from gpu.guard import Guard
from gpu.record import Item, Record, take
from umem.demo.process import WorkerProcess

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Context:
    """`cache` is where the torch extension is kept, `folder` where the parts' records are.

    `oversubscribe`: a part may need more than the device has free.
    """

    guard: Guard
    record: Record
    config: Config
    deadline: Deadline
    folder: Path
    cache: str | None = None
    oversubscribe: bool = False

    def share(self, share: float) -> Context:
        """Return the context with a share of the remaining time."""
        return replace(self, deadline=self.deadline.within(self.deadline.left * share))

    @contextlib.contextmanager
    def worker(self, spec: GpuSpec) -> Iterator[WorkerProcess]:
        """Provide the process of a training; its start takes none of the time to measure in."""
        with contextlib.ExitStack() as stack:
            with self.deadline.stopped():
                made = children.worker(self.guard, replace(spec, torch_ext_cache=self.cache))
                process = stack.enter_context(made)
            yield process


def measure_each(
    context: Context,
    question: str,
    subjects: Sequence[tuple[str, Subject]],
    measure: Callable[[Subject, Context], None],
) -> None:
    """Take one item a subject, named as given, each with its share of the time that is left."""

    def one(subject: Subject, left: int) -> None:
        measure(subject, context.share(1 / left))

    items = [
        Item(name, question, functools.partial(one, subject, len(subjects) - i))
        for i, (name, subject) in enumerate(subjects)
    ]
    take(context.record, items, context.deadline)
