"""`umem trace info` and `umem trace convert`, run as users run them."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import pickle
import tracemalloc
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import schemas
from support.synthetic import random_trace, training

from umem import TraceError
from umem.cli import main
from umem.trace import perfetto, torch_snapshot
from umem.trace.convert import convert, merge
from umem.trace.info import examine
from umem.trace.reader import read
from umem.trace.schema import Alloc, Event, Free, Header, Op, Step, Validator
from umem.trace.step_builder import read_step
from umem.trace.writer import Writer

MIB = 1 << 20
HEADER = Header("a100-pcie4", "test", "a note")


def write(path: Path, events: Iterable[Event]) -> Path:
    with Writer(path, HEADER) as writer:
        for event in events:
            writer.write(event)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two steps by hand; the peak is in the second step's first op, inside it."""
    step: list[Any] = [Alloc(2, 3 * MIB, "activation"), Op("mm", (1,), (2,), 5.0), Free(2), Step()]
    events: list[Any] = [Alloc(1, 4 * MIB, "param", "linear"), *step]
    events += [step[0], Alloc(3, MIB, "workspace"), Free(3), *step[1:]]
    return write(tmp_path / "small.jsonl", [*events, Op("end", (1,), (1,))])


def test_info_says_what_the_trace_holds(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "info", str(small), "--json"]) == 0
    assert schemas.read("trace_info", capsys.readouterr().out) == {
        "device": "a100-pcie4",
        "source": "test",
        "note": "a note",
        "events": 12,
        "steps": 2,
        "ops": 3,
        "allocs": 4,
        "frees": 3,
        "ops_without_time": 1,
        "small_tensors": 1,
        "small_bytes": MIB,
        "allocated_bytes": 11 * MIB,
        "live_bytes_at_end": 4 * MIB,
        "peak_bytes": 8 * MIB,
        "peak_op": 1,
        "peak_op_name": "mm",
        "peak_by_tag": {"param": 4 * MIB, "activation": 3 * MIB, "workspace": MIB},
        "compute_us": 10.0,
        "step_compute_us": 5.0,
        "largest": [
            {"id": 1, "bytes": 4 * MIB, "tag": "param", "family": "linear"},
            {"id": 2, "bytes": 3 * MIB, "tag": "activation", "family": ""},
            {"id": 2, "bytes": 3 * MIB, "tag": "activation", "family": ""},
            {"id": 3, "bytes": MIB, "tag": "workspace", "family": ""},
        ],
    }
    assert main(["trace", "info", str(small)]) == 0
    text = capsys.readouterr().out
    assert "8 MiB live in op 1, mm" in text
    assert "3 MiB   37.5%  activation" in text
    assert "3, 1 without a time" in text
    assert "1 of 4 tensors are below 2 MiB, with 9.1% of all allocated bytes" in text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000))
def test_the_peak_is_the_highest_of_all_places(tmp_path: Path, seed: int) -> None:
    events = list(random_trace(seed, ops=8))
    live: dict[int, Alloc] = {}
    peak, at_peak = 0, dict(live)
    for event in events:
        if isinstance(event, Alloc):
            live[event.id] = event
        elif isinstance(event, Free):
            del live[event.id]
        if sum(a.bytes for a in live.values()) > peak:
            peak, at_peak = sum(a.bytes for a in live.values()), dict(live)
    info = examine(write(tmp_path / "t.jsonl", events))
    assert info.peak_bytes == peak
    tags = {a.tag for a in at_peak.values()}
    by_tag = {tag: sum(a.bytes for a in at_peak.values() if a.tag == tag) for tag in tags}
    assert info.peak_by_tag == {tag: count for tag, count in by_tag.items() if count}


def test_of_equal_peaks_the_first_is_named(tmp_path: Path) -> None:
    events: list[Event] = [Alloc(1, 5), Op("first", (1,), ()), Free(1)]
    info = examine(write(tmp_path / "t.jsonl", [*events, Alloc(1, 5), Op("second", (1,), ())]))
    assert (info.peak_op, info.peak_op_name) == (0, "first")


def test_names_from_a_file_stay_on_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    events: list[Any] = [Alloc(1, MIB, "a\nb\x1b[31m", "\x00"), Op("x\ry", (1,), ())]
    with Writer(path, Header("d\n", "s\n", "n\n")) as writer:
        for event in events:
            writer.write(event)
    assert main(["trace", "info", str(path)]) == 0
    assert not set(capsys.readouterr().out) & set("\r\x00\x1b")


def test_an_empty_trace_has_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "info", str(write(tmp_path / "t.jsonl", []))]) == 0
    text = capsys.readouterr().out
    assert "none marked" in text
    assert "no tensors" in text


def test_between_packed_and_plain_nothing_is_lost(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.jsonl", random_trace(3))
    packed, again = tmp_path / "b.jsonl.gz", tmp_path / "c.jsonl"
    assert main(["trace", "convert", str(plain), str(packed)]) == 0
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    convert(packed, again)
    assert again.read_bytes() == plain.read_bytes()
    convert(again, again)  # in place
    assert again.read_bytes() == plain.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl.gz", "c.jsonl"]


def test_the_last_step_alone_is_planned_the_same(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.jsonl", training(4, 4 * MIB, MIB, 5, small=1, optimizer=True))
    alone = tmp_path / "b.jsonl"
    assert main(["trace", "convert", str(whole), str(alone), "--step", "last"]) == 0
    before, after = read_step(whole), read_step(alone)
    for name in (
        "op_us",
        "bytes",
        "kind",
        "first",
        "last",
        "next_alias",
        "source",
        "access_tensor",
    ):
        assert getattr(before, name).tolist() == getattr(after, name).tolist()
    info = examine(alone)
    assert (info.steps, info.ops) == (1, 12)


def test_a_picture_has_the_ops_and_the_memory(small: Path, tmp_path: Path) -> None:
    target = tmp_path / "t.json"
    assert main(["trace", "convert", str(small), str(target)]) == 0
    drawn = json.loads(target.read_text())["traceEvents"]
    ops = [(e["name"], e["ts"], e["dur"]) for e in drawn if e["ph"] == "X" and e["tid"] == 2]
    assert ops == [("mm", 0.0, 5.0), ("mm", 5.0, 5.0), ("end", 10.0, 1.0)]
    steps = [(e["name"], e["ts"], e["dur"]) for e in drawn if e["ph"] == "X" and e["tid"] == 1]
    assert steps == [("step 0", 0.0, 5.0), ("step 1", 5.0, 5.0)]
    alone = tmp_path / "alone.json"
    assert main(["trace", "convert", "--step", "last", str(small), str(alone)]) == 0
    last = json.loads(alone.read_text())["traceEvents"]
    steps = [(e["name"], e["ts"], e["dur"]) for e in last if e["ph"] == "X" and e["tid"] == 1]
    assert steps == [("step 0", 0.0, 5.0)]
    memory = [(e["ts"], e["args"]) for e in drawn if e["ph"] == "C"]
    assert memory == [
        (0.0, {"param": 4 * MIB, "activation": 3 * MIB}),
        (5.0, {"param": 4 * MIB, "activation": 3 * MIB, "workspace": MIB}),
        (10.0, {"param": 4 * MIB, "activation": 3 * MIB, "workspace": 0}),
        (10.0, {"param": 4 * MIB, "activation": 0}),
    ]


def test_slices_of_a_picture_do_not_overlap(tmp_path: Path) -> None:
    """A viewer draws what overlaps by a rounding as nested, and cuts times to nanoseconds."""
    source, target = tmp_path / "t.jsonl", tmp_path / "t.json"
    write(source, [*(Op("mm", (), (), us=0.1 * i + 1 / 3) for i in range(1, 500)), Step()])
    assert main(["trace", "convert", str(source), str(target)]) == 0
    drawn = json.loads(target.read_text())
    assert "displayTimeUnit" not in drawn  # older versions of Perfetto took it for the unit
    ops = [e for e in drawn["traceEvents"] if e["ph"] == "X" and e["tid"] == 2]
    assert len(ops) == 499
    for op, following in itertools.pairwise(ops):
        assert Decimal(str(op["ts"])) + Decimal(str(op["dur"])) == Decimal(str(following["ts"]))


def test_traces_of_ranks_become_one_picture(tmp_path: Path) -> None:
    """Each in separate rows, as it would be drawn alone."""
    alone = {}
    for rank, us in enumerate((5.0, 7.0)):
        name = f"t.rank{rank}.jsonl"
        events = [Step(), Alloc(1, 4 * MIB, "param"), Op("mm", (), (1,), us=us), Step()]
        write(tmp_path / name, events)
        assert main(["trace", "convert", str(tmp_path / name), str(tmp_path / "one.json")]) == 0
        alone[name] = json.loads((tmp_path / "one.json").read_text())["traceEvents"]
    target = tmp_path / "all.json"
    assert main(["trace", "convert", *(str(tmp_path / name) for name in alone), str(target)]) == 0
    drawn = json.loads(target.read_text())["traceEvents"]
    groups = {e["pid"]: e["args"]["name"] for e in drawn if e["name"] == "process_name"}
    assert list(groups.values()) == list(alone)
    for process, name in groups.items():
        mine = [{**e, "pid": 1} for e in drawn if e["pid"] == process and e["ph"] != "M"]
        assert mine == [e for e in alone[name] if e["ph"] != "M"]
        (op,) = [e for e in mine if e["name"] == "mm"]
        assert op["dur"] == (5.0 if "rank0" in name else 7.0)


def test_many_traces_are_open_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [tmp_path / f"t.rank{rank}.jsonl" for rank in range(4)]
    for source in sources:
        write(source, [Step(), Alloc(1, 4 * MIB, "param"), Op("mm", (), (1,), us=5.0), Step()])
    most = 0

    def written(stream: Any, traces: list[Any]) -> None:
        nonlocal most
        for trace in traces:
            for _ in trace.events:
                most = max(most, len(open_in(tmp_path)))

    monkeypatch.setattr(perfetto, "write", written)
    merge(sources, tmp_path / "all.json")
    assert most == 2  # the source and the target


def open_in(folder: Path) -> list[str]:
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            links.append(str(descriptor.readlink()))
    return [link for link in links if link.startswith(str(folder))]


def frames(*names: str) -> list[dict[str, Any]]:
    return [{"name": n, "filename": f, "line": 3} for n, _, f in (n.partition("@") for n in names)]


def entry(action: str, addr: int, size: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 1, **more}


def snapshot_of(*traces: list[Any]) -> dict[str, Any]:
    blocks = [
        {"address": 4096, "size": 512, "requested_size": 500, "state": "active_allocated"},
        {"address": 4608, "size": 512, "requested_size": 512, "state": "inactive"},
        {"address": 5120, "size": 1024, "requested_size": 900, "state": "active_allocated"},
    ]
    segment = {"device": 0, "address": 4096, "total_size": 2048, "blocks": blocks}
    return {"segments": [segment], "device_traces": list(traces), "allocator_settings": {}}


HISTORY = [
    entry("segment_alloc", 4096, 2048),
    entry("free_requested", 4608, 512),
    entry("free_completed", 4608, 512),
    entry("alloc", 5120, 900, frames=frames("at::empty@x.cpp", "forward@/a/net.py", "main@m.py")),
    entry("alloc", 4608, 100, frames=[]),
    entry("free_requested", 4608, 100),
    entry("free_completed", 4608, 100),
    {"action": "oom", "device_free": 1, "size": 9, "stream": 0, "frames": []},
    entry("snapshot", 0, 0),
]


def test_a_memory_snapshot_becomes_a_trace(tmp_path: Path) -> None:
    source, target = tmp_path / os.fsdecode(b"s\xff.pickle"), tmp_path / "t.jsonl"
    source.write_bytes(pickle.dumps(snapshot_of(HISTORY)))
    assert main(["trace", "convert", str(source), str(target)]) == 0
    header, events = read(target)
    assert header == Header("cuda:0", "torch memory snapshot", "s\\udcff.pickle")
    assert list(events) == [
        Alloc(0, 512),  # freed in the history, so there before
        Alloc(1, 500),  # there now, and not allocated in the history
        Free(0),
        Alloc(2, 900),
        Op("forward net.py:3", (), (2,)),
        Alloc(3, 100),
        Op("alloc", (), (3,)),
        Free(3),
    ]


def test_of_several_devices_one_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "s.pickle", tmp_path / "t.jsonl"
    second = [entry("alloc", 1, 7, frames=[])]
    source.write_bytes(pickle.dumps(snapshot_of(HISTORY, second)))
    assert main(["trace", "convert", str(source), str(target)]) == 2
    assert "devices 0, 1 have a history; choose one with --gpu" in capsys.readouterr().err
    assert main(["trace", "convert", str(source), str(target), "--gpu", "1"]) == 0
    assert next(read(target)[1]) == Alloc(0, 7)
    assert main(["trace", "convert", str(source), str(target), "--gpu", "2"]) == 2
    assert "device 2 has no history; allowed: 0, 1" in capsys.readouterr().err


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("evil"),))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (Evil(), "not a pickle of a memory snapshot: it names "),
        ({"segments": [Path("x")]}, "it names pathlib"),
        ([1], "not as torch.cuda.memory._snapshot writes it"),
        ({"segments": []}, "KeyError: 'device_traces'"),
        (snapshot_of([]), "the snapshot has no history"),
        (snapshot_of([entry("alloc", -1, 1)]), "-1 is not an address or a size"),
        (snapshot_of([entry("alloc", 1, 1 << 61)]), "is not an address or a size"),
        (snapshot_of([entry("alloc", 1, "x")]), "'x' is not an address or a size"),
        (snapshot_of(["alloc"]), "TypeError"),
    ],
)
def test_a_bad_snapshot_is_one_line_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "s.pickle"
    source.write_bytes(pickle.dumps(content))
    with pytest.raises(TraceError) as caught:
        convert(source, tmp_path / "t.jsonl")
    assert str(caught.value).startswith(f"{source}: ")
    assert reason in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["s.pickle"]


def test_a_snapshot_of_a_few_bytes_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    # An empty list as object number 2^32 - 1, and bytes and a byte array that claim to be longer
    # than the file.
    for content in (
        b"\x80\x04]r\xff\xff\xff\xff.",
        b"\x80\x04\x8e" + bytes(7) + b"\x40.",
        b"\x80\x05\x96" + (1 << 30).to_bytes(8, "little") + b".",
    ):
        path.write_bytes(content)
        tracemalloc.start()
        with pytest.raises(TraceError, match=f"^{path}: not "):
            convert(path, tmp_path / "t.jsonl")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 10 * MIB


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_snapshot_is_an_error_or_a_valid_trace(
    tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(pickle.dumps(snapshot_of(HISTORY)))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(1, len(content) - 1))] = data.draw(st.integers(32, 126))
    path = tmp_path / "s.pickle"
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    events: list[Event] = []
    failure = f"{path}: "
    try:
        events.extend(torch_snapshot.read(path)[1])
    except TraceError as error:
        failure = str(error)
    assert failure.startswith(f"{path}: ")
    validator = Validator()
    for event in events:
        validator.check(event)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["info", "none.jsonl"], "none.jsonl: No such file or directory"),
        (["info", "."], ".: Is a directory"),
        (["convert", "none.jsonl", "t.jsonl"], "none.jsonl: No such file or directory"),
        (["convert", "bad.jsonl", "t.jsonl"], "bad.jsonl:3: free of id 7"),
        (["convert", "bad.jsonl", "t.json"], "bad.jsonl:3: free of id 7"),
        (
            ["convert", "bad.jsonl", "t.txt"],
            "t.txt: not a known format; the name must end in .jsonl, ",
        ),
        (["convert", "bad.jsonl", "no/t.jsonl"], "no/t.jsonl: No such file or directory"),
        (["convert", "bad.jsonl", "no/t.json"], "no/t.json: No such file or directory"),
        (["convert", "bad.jsonl", "t.jsonl", "--gpu", "0"], "--gpu is for memory snapshots"),
        (["convert", "empty.jsonl", "bad.jsonl", "t.json"], "bad.jsonl:3: free of id 7"),
        (["convert", "empty.jsonl", "empty.jsonl", "t.jsonl"], "t.jsonl: several traces become"),
        (["convert", "a.jsonl", "b.jsonl", "t.json", "--gpu", "0"], "--gpu is for one memory"),
        (["convert", "empty.jsonl", "t.jsonl", "--step", "last"], "no step: the trace has no op"),
    ],
)
def test_a_failure_is_one_line_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = write(tmp_path / "bad.jsonl", [Step()])
    with bad.open("a") as file:
        file.write('{"e":"free","id":7}\n')
    write(tmp_path / "empty.jsonl", [])
    assert main(["trace", *args]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("umem trace: ")
    assert reason in printed.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "empty.jsonl"]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_what_is_whole_of_a_trace_cut_off_is_kept(
    tmp_path: Path, ending: str, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    events = list(training(4, 4 * MIB, MIB, 6))
    data = write(tmp_path / f"whole{ending}", events).read_bytes()
    cut, out = tmp_path / f"cut{ending}", tmp_path / "out.jsonl"
    cut.write_bytes(data[: int(len(data) * share)].rstrip(b"\n"))
    with pytest.raises(TraceError, match=r"cut off.*convert --partial"):
        convert(cut, out)
    assert not out.exists()
    assert main(["trace", "convert", "--partial", str(cut), str(out)]) == 0
    _, left = read(out)
    kept = list(left)
    assert kept == events[: len(kept)]
    assert 0 < len(kept) < len(events)
    if ending == ".jsonl":
        assert len(kept) == cut.read_bytes().count(b"\n") - 1
    assert f"cut off; {len(kept) + 1} whole lines were read" in caplog.text


def test_partial_keeps_all_of_a_whole_trace_and_refuses_a_damaged_one(tmp_path: Path) -> None:
    events = list(training(4, 4 * MIB, MIB, 2))
    whole = write(tmp_path / "whole.jsonl", events)
    convert(whole, tmp_path / "out.jsonl", partial=True)
    assert (tmp_path / "out.jsonl").read_bytes() == whole.read_bytes()
    lines = whole.read_bytes().splitlines(keepends=True)
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b"".join([*lines[:3], lines[3][:-5] + b"\n", *lines[4:]]))
    with pytest.raises(TraceError, match=r"bad\.jsonl:4: not JSON"):
        convert(bad, tmp_path / "no.jsonl", partial=True)


def test_keys_of_a_snapshot_are_names_and_numbers(tmp_path: Path) -> None:
    """The hash of a tuple that is nested deeply enough ends the process."""
    path = tmp_path / "s.pickle"
    nested = b")" + b"\x85" * 1_000_000
    for content in (b"\x80\x02}" + nested + b"K\x01s.", b"\x80\x02}(" + nested + b"K\x01u."):
        path.write_bytes(content)
        with pytest.raises(TraceError, match="a tuple is a key, and a snapshot has names"):
            convert(path, tmp_path / "t.jsonl")
    path.write_bytes(b"\x80\x04\x8f(" + nested + b"\x90.")
    with pytest.raises(TraceError, match="it has a set or a byte array"):
        convert(path, tmp_path / "t.jsonl")
