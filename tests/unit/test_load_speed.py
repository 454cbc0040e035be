"""Loading a trace takes time in proportion to reading its text, on any machine."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.synthetic import write

from umem.base import collector
from umem.simulation import replay
from umem.trace.ids import block_ids
from umem.trace.schema import Alloc, Event, Free, Op, Step

MIB = 1 << 20


def training(layers: int) -> Iterator[Event]:
    """Yield a step that keeps its tensors, and frees them in a second half."""
    ids = block_ids()
    kept = [next(ids) for _ in range(layers)]
    for i, block in enumerate(kept):
        yield Alloc(block, MIB << i % 5, "activation", "linear", extra={"module": f"layers.{i}"})
        yield Op("aten::mm", tuple(kept[max(i - 1, 0) : i]), (block,), 150.0, family="linear")
    for block in reversed(kept):
        yield Op("aten::mm_backward", (block,), (), 300.0, family="linear")
        yield Free(block)
    yield Step()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "t.jsonl", training(10_000))


def seconds(call: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    begun = time.process_time()
    call()
    return time.process_time() - begun


def test_a_trace_is_loaded_in_a_few_times_what_json_takes(trace: Path) -> None:
    lines = trace.read_text().splitlines()
    # The least of a few ratios: the processor's speed may change at any time, and by a factor of 2.
    ratios = []
    for _ in range(5):
        text = seconds(lambda: [json.loads(line) for line in lines])
        ratios.append(seconds(lambda: replay.load_devices(trace)) / text)
    assert min(ratios) < 2.4, ratios  # about 1.6


def test_the_garbage_collector_does_not_look_through_the_events(trace: Path) -> None:
    with counted() as runs:
        replay.load_devices(trace)
    assert gc.isenabled()
    assert len(runs) <= 1  # before it is on again: the first load in a process leaves some objects
    with counted() as runs:
        objects: list[list[int]] = [[] for _ in range(10_000)]
    assert runs, f"{len(objects)} objects start it, if it is on"


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_is_left_as_it_was(before: bool) -> None:
    @collector.paused()
    def fails() -> None:
        assert not gc.isenabled()
        raise KeyError

    (gc.enable if before else gc.disable)()
    try:
        with pytest.raises(KeyError):
            fails()
        assert gc.isenabled() is before
    finally:
        gc.enable()


def test_the_collector_stays_off_until_the_last_block_ends() -> None:
    first, second = collector.paused(), collector.paused()
    first.__enter__()
    second.__enter__()  # on another thread
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


@contextmanager
def counted() -> Iterator[list[str]]:
    """Record the start of each run of the collector."""
    runs: list[str] = []

    def begins(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            runs.append(f"generation {info['generation']}")

    gc.callbacks.append(begins)
    try:
        yield runs
    finally:
        gc.callbacks.remove(begins)
