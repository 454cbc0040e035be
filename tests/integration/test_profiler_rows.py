"""umem's transfers are rows in the Chrome traces of torch.profiler."""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile, schedule  # noqa: E402
from torch.profiler.profiler import _KinetoProfile  # noqa: E402

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.integrations.torch import profiler_rows  # noqa: E402

MIB = 1 << 20


def train(steps: int) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(724, 724) for _ in range(16)))  # 2 MiB each
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        net(torch.ones(8, 724)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def profiled(path: Path, steps: int = 2) -> dict[str, Any]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(steps)
    profiler.export_chrome_trace(str(path))
    return read(path)


def read(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    return found


def rows(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") == "umem"]


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_every_transfer_is_a_slice_within_the_profile(tmp_path: Path, suffix: str) -> None:
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        before = umem.stats()
        trace = profiled(tmp_path / f"t{suffix}")
        after = umem.stats()
    found = rows(trace)
    out = [event["args"]["bytes"] for event in found if event["name"].startswith("send out")]
    into = [event["args"]["bytes"] for event in found if event["name"].startswith("bring in")]
    assert sum(out) == after.bytes_out - before.bytes_out > 0
    assert 0 < sum(into) <= after.bytes_in - before.bytes_in  # page faults are no transfers
    ops = [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    begin = min(event["ts"] for event in ops)
    end = max(event["ts"] + event["dur"] for event in ops)
    for event in found:
        assert begin - 1e4 < event["ts"] <= event["ts"] + event["dur"] < end + 1e4
    for row in range(len(profiler_rows._ROWS)):
        slices = sorted((e["ts"], e["dur"]) for e in found if e["tid"] == row)
        assert slices
        for (start, lasted), (following, _) in itertools.pairwise(slices):
            assert start + lasted <= following + 0.01  # a lane works on one at a time


def test_no_op_begins_or_ends_in_a_transfer(tmp_path: Path) -> None:
    """On the software device the thread of the ops does them: the clocks can be compared."""
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        trace = profiled(tmp_path / "t.json")
    ops = [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    times = sorted(t for event in ops for t in (event["ts"], event["ts"] + event["dur"]))
    into = [event for event in rows(trace) if event["name"].startswith("bring in")]
    apart = [
        bisect.bisect(times, event["ts"]) == bisect.bisect(times, event["ts"] + event["dur"])
        for event in into
    ]
    assert sum(apart) >= 0.9 * len(apart) > 0
    assert sum(event["dur"] for event in into) > len(into)  # a microsecond is little for 2 MiB


def test_rows_have_names(tmp_path: Path) -> None:
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        events = profiled(tmp_path / "t.json")["traceEvents"]
    named = {
        (event["name"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["pid"] == "umem 0"
    }
    assert named == {
        ("process_name", 0): "umem, device 0",
        ("thread_name", 0): "to the device",
        ("thread_name", 1): "to the host",
        ("thread_name", 2): "on the device",
    }


def test_each_cycle_of_a_schedule_has_its_own(tmp_path: Path) -> None:
    written: list[Path] = []

    def ready(profiler: profile) -> None:
        written.append(tmp_path / f"{len(written)}.json")
        profiler.export_chrome_trace(str(written[-1]))

    with (
        umem.enable(budget="24MiB", device="soft", policy="lru"),
        profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=1, warmup=1, active=1),
            acc_events=True,
            on_trace_ready=ready,
        ) as profiler,
    ):
        for _ in range(6):
            train(1)
            profiler.step()
    first, second = (rows(read(path)) for path in written)
    assert first
    assert second
    assert max(event["ts"] for event in first) < min(event["ts"] for event in second)


def test_a_profile_without_transfers_is_as_torch_wrote_it(tmp_path: Path) -> None:
    with umem.enable(budget="1GiB", device="soft", policy="none"):
        trace = profiled(tmp_path / "t.json", steps=1)
    assert rows(trace) == []
    assert not [event for event in trace["traceEvents"] if event["pid"] == "umem 0"]


def test_a_profile_that_ended_keeps_its_rows(tmp_path: Path) -> None:
    with (
        umem.enable(budget="24MiB", device="soft", policy="lru"),
        profile(activities=[ProfilerActivity.CPU]) as profiler,
    ):
        train(2)
    profiler.export_chrome_trace(str(tmp_path / "t.json"))
    assert rows(read(tmp_path / "t.json"))


def test_afterwards_torch_has_its_own_methods(tmp_path: Path) -> None:
    before = vars(_KinetoProfile).copy()
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        assert _KinetoProfile.start_trace is not before["start_trace"]
    assert _KinetoProfile.start_trace is before["start_trace"]
    assert _KinetoProfile.stop_trace is before["stop_trace"]
    assert rows(profiled(tmp_path / "t.json", steps=1)) == []


def test_more_transfers_than_are_kept_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core, "take_transfer_log", lambda: ([(0, "bring in", 1, 1, 2)], 3))
    with (
        caplog.at_level(logging.WARNING, logger="umem"),
        umem.enable(budget="24MiB", device="soft", policy="lru"),
        profile(activities=[ProfilerActivity.CPU]),
    ):
        torch.ones(3)
    assert "3 transfers of a profile are not in its rows, which have 1" in caplog.text


@pytest.mark.parametrize("events", ["[]", "[\n]", '[{"ph": "X"}]'])
def test_rows_go_before_the_events_that_there_are(tmp_path: Path, events: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(f'{{"baseTimeNanoseconds": 1000, "traceEvents": {events}, "more": 1}}')
    count = len(json.loads(events))
    assert profiler_rows.add_rows(path, [(0, "bring in", MIB, 3000, 5500)])
    found = json.loads(path.read_text())
    assert found["more"] == 1
    assert len(found["traceEvents"]) == count + 5
    assert found["traceEvents"][4] == {
        "pid": "umem 0",
        "tid": 0,
        "ph": "X",
        "cat": "umem",
        "name": "bring in 1 MiB",
        "ts": 2.0,
        "dur": 2.5,
        "args": {"bytes": MIB},
    }


@pytest.mark.parametrize("text", ["[]", '{"traceEvents": []}', '{"baseTimeNanoseconds": 1}'])
def test_a_file_of_another_form_stays_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    assert not profiler_rows.add_rows(path, [(0, "bring in", MIB, 3000, 5500)])
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]
