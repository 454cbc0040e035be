"""Exports of a trace for torch's viewer: memory snapshots."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from support.synthetic import random_trace

from umem import TraceError
from umem.trace.convert import FORMS, convert
from umem.trace.info import examine
from umem.trace.reader import read
from umem.trace.schema import Alloc, Free, Header, Op, Step
from umem.trace.writer import Writer

MIB = 1 << 20


def write(path: Path, events: Any) -> Path:
    with Writer(path, Header("a100-pcie4", "test", "a note")) as writer:
        for event in events:
            writer.write(event)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A weight that two operators use, with one between them; two devices; one id used twice."""
    return write(tmp_path / "small.jsonl", [
        Alloc(1, 4 * MIB, "param", "linear"),
        Alloc(2, 3 * MIB, "activation"), Op("mm", (1,), (2,), 5.0),
        Alloc(3, 100, device=1), Op("relu", (2,), (3,), 2.0), Free(2),
        Op("add_", (1,), (1,), 4.0), Step(),
        Alloc(2, 7 * MIB, "grad"), Op("sum", (1,), (2,)),
    ])  # fmt: skip


def snapshot(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        found: dict[str, Any] = pickle.load(stream)
    return found


def test_a_snapshot_has_history_and_what_is_live(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pickle"
    convert(small, out)
    found = snapshot(out)
    first, second = found["device_traces"]
    allocs = [
        (e["size"], e["time_us"], e["frames"][0]["name"]) for e in first if e["action"] == "alloc"
    ]
    assert allocs == [(4 * MIB, 0, "mm"), (3 * MIB, 0, "mm"), (7 * MIB, 11, "sum")]
    assert [e["size"] for e in second if e["action"] == "alloc"] == [100]
    live = [
        (segment["device"], block["requested_size"])
        for segment in found["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    assert live == [(0, 4 * MIB), (0, 7 * MIB), (1, 100)]


@pytest.mark.parametrize("seed", range(5))
def test_a_snapshot_comes_back_as_the_trace(tmp_path: Path, seed: int) -> None:
    """Blocks never overlap, and umem's own reader finds the same sizes in the same order."""
    source = write(tmp_path / "in.jsonl", random_trace(seed))
    convert(source, tmp_path / "out.pickle")
    convert(tmp_path / "out.pickle", tmp_path / "back.jsonl")
    want, back = examine(source), examine(tmp_path / "back.jsonl")
    assert (back.allocs, back.frees, back.allocated_bytes) == (
        want.allocs, want.frees, want.allocated_bytes,
    )  # fmt: skip
    assert (back.peak_bytes, back.live_bytes_at_end) == (want.peak_bytes, want.live_bytes_at_end)
    live: dict[int, int] = {}
    for entry in snapshot(tmp_path / "out.pickle")["device_traces"][0]:
        address, size = entry["addr"], entry["size"]
        if entry["action"] == "alloc":
            assert all(address + size <= a or a + n <= address for a, n in live.items())
            live[address] = size
        elif entry["action"] == "free_completed":
            del live[address]


def test_torchs_own_viewer_reads_a_snapshot(small: Path, tmp_path: Path) -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    convert(small, tmp_path / "out.pickle")
    found = snapshot(tmp_path / "out.pickle")
    text = viewer.trace(found)
    assert "Device 0" in text
    assert "b = a[0:4.0MiB]" in text
    assert "total_allocated: 11.0MiB" in viewer.segsum(found)
    assert len(viewer.trace_plot(found)) > len(viewer.trace_plot({**found, "device_traces": [[]]}))


def test_an_unknown_name_lists_what_is_known(small: Path) -> None:
    with pytest.raises(TraceError, match=r"must end in \.jsonl, \.jsonl\.gz, \.json, \.pickle"):
        convert(small, small.with_suffix(".txt"))
    assert ".pickle" in FORMS


def test_a_block_of_a_snapshot_whose_free_is_missing_ends_at_the_next_one(tmp_path: Path) -> None:
    source, out = tmp_path / "short.pickle", tmp_path / "out.jsonl"
    history = [{"action": "alloc", "addr": 4096, "size": size} for size in (512, 2048)]
    source.write_bytes(pickle.dumps({"device_traces": [history], "segments": []}))
    convert(source, out)
    _, trace = read(out)
    events = [event for event in trace if isinstance(event, (Alloc, Free))]
    first, freed, second = events
    assert isinstance(first, Alloc)
    assert isinstance(second, Alloc)
    assert (first.bytes, second.bytes) == (512, 2048)
    assert freed == Free(first.id)
