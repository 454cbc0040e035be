"""What other tools read of a trace: tables, pictures, and torch's memory snapshots."""

from __future__ import annotations

import csv
import pickle
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from support.synthetic import random_trace, training

from umem import NotSupportedError, TraceError
from umem.base import extras
from umem.cli import main
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


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_row_is_one_life_of_a_block(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "blocks.csv"
    assert main(["trace", "convert", str(small), str(out)]) == 0
    freed, weight, other, again = rows(out)
    assert freed == {
        "id": "2", "device": "0", "tag": "activation", "family": "", "bytes": str(3 * MIB),
        "born_op": "0", "born_us": "0.0", "freed_op": "2", "freed_us": "7.0", "made_by": "mm",
        "uses": "2", "reads": "1", "writes": "1", "last_use_op": "1", "longest_unused_ops": "0",
        "longest_unused_us": "0.0",
    }  # fmt: skip
    assert (weight["uses"], weight["reads"], weight["writes"]) == ("3", "3", "1")
    assert (weight["longest_unused_ops"], weight["longest_unused_us"]) == ("1", "2.0")
    assert (weight["freed_op"], weight["last_use_op"]) == ("", "3")
    assert (other["device"], other["bytes"], other["made_by"]) == ("1", "100", "relu")
    assert (again["id"], again["born_op"], again["born_us"]) == ("2", "3", "11.0")


@pytest.mark.parametrize("seed", range(5))
def test_the_rows_add_up_to_the_trace(tmp_path: Path, seed: int) -> None:
    source = write(tmp_path / "in.jsonl", random_trace(seed))
    convert(source, tmp_path / "out.csv")
    info, table = examine(source), rows(tmp_path / "out.csv")
    assert len(table) == info.allocs
    assert sum(int(row["bytes"]) for row in table) == info.allocated_bytes
    assert sum(row["freed_op"] != "" for row in table) == info.frees
    _, events = read(source)
    uses = sum(len(set(e.reads) | set(e.writes)) for e in events if type(e) is Op)
    assert sum(int(row["uses"]) for row in table) == uses


def test_parquet_has_the_rows_of_csv(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", training(3, 4 * MIB, 2 * MIB))
    for suffix in ("csv", "parquet"):
        convert(source, tmp_path / f"out.{suffix}")
    table = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    as_text = [
        {name: "" if value is None else str(value) for name, value in row.items()} for row in table
    ]
    assert as_text == rows(tmp_path / "out.csv")


def test_without_the_library_the_error_says_what_to_install(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("pyarrow", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    for suffix, what in ((".parquet", "pyarrow"), (".svg", "matplotlib")):
        out = tmp_path / f"out{suffix}"
        assert main(["trace", "convert", str(small), str(out)]) == 2
        assert f"needs {what}, not installed here: pip install" in capsys.readouterr().err
        assert not out.exists()
    with pytest.raises(NotSupportedError, match="a test needs no_such, not installed"):
        extras.load("no_such.module", "a test", "no_such")


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_a_picture_shows_each_tag(small: Path, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / f"out{suffix}"
    convert(small, out)
    if suffix == ".svg":
        ET.parse(out)  # well-formed
        text = out.read_text(encoding="utf-8")
        for word in ("param", "activation", "grad", "untagged", "live bytes, at most 11"):
            assert f"<!-- {word}" in text  # a text's glyphs come after it as a comment
    else:
        assert out.read_bytes()[:4] in (b"\x89PNG", b"%PDF")


def test_a_long_trace_keeps_its_peak_in_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    events: list[Any] = [Alloc(0, MIB, "param")]
    for number in range(1, 10_000):
        size = 300 * MIB if number == 5_001 else MIB
        events += [Alloc(number, size), Op("op", (0,), (number,), 1.0), Free(number)]
    convert(write(tmp_path / "in.jsonl", events), tmp_path / "out.svg")
    assert "<!-- live bytes, at most 301 MiB" in (tmp_path / "out.svg").read_text(encoding="utf-8")


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
    with pytest.raises(TraceError, match=r"must end in .*\.csv, \.parquet, \.svg"):
        convert(small, small.with_suffix(".txt"))
    assert ".pickle" in FORMS
