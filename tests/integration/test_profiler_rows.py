"""umem's transfers are rows in the Chrome traces of torch.profiler."""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import logging
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile, schedule  # noqa: E402

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


def trained(kind: type[profile] = profile) -> profile:
    """The profile of a training, which has ended, and umem with it."""
    with (
        umem.enable(budget="24MiB", device="soft", policy="lru"),
        kind(activities=[ProfilerActivity.CPU]) as profiler,
    ):
        train(2)
    return profiler


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
    assert 0 < sum(into) <= after.bytes_in - before.bytes_in  # page faults are not transfers
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
    trained().export_chrome_trace(str(tmp_path / "t.json"))
    assert rows(read(tmp_path / "t.json"))


def test_afterwards_torch_has_its_own_methods(tmp_path: Path) -> None:
    own = torch.autograd.profiler.profile
    before = vars(own).copy()
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        assert own._start_trace is not before["_start_trace"]
    assert own._start_trace is before["_start_trace"]
    assert own.__exit__ is before["__exit__"]
    assert rows(profiled(tmp_path / "t.json", steps=1)) == []


def test_a_profile_that_was_made_before_umem_was_on_has_rows(tmp_path: Path) -> None:
    profiler = profile(activities=[ProfilerActivity.CPU])
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        with profiler:
            train(2)
        profiler.export_chrome_trace(str(tmp_path / "t.json"))
    assert rows(read(tmp_path / "t.json"))


def test_a_profile_that_goes_on_without_umem_leaves_no_log(tmp_path: Path) -> None:
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        profiler = profile(activities=[ProfilerActivity.CPU])
        profiler.start()
        train(2)
    profiler.stop()
    profiler.export_chrome_trace(str(tmp_path / "t.json"))
    assert rows(read(tmp_path / "t.json")) == []
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        before = umem.stats().bytes_out
        train(2)
        assert umem.stats().bytes_out > before
        assert core.take_transfer_log() == ([], 0)


def test_one_that_is_off_does_not_end_the_log(tmp_path: Path) -> None:
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            with torch.autograd.profiler.profile(enabled=False):
                torch.ones(3)
            train(2)
        profiler.export_chrome_trace(str(tmp_path / "t.json"))
    assert rows(read(tmp_path / "t.json"))


def test_a_profile_that_packs_its_file_has_rows_in_it(tmp_path: Path) -> None:
    class Uploading(profile):
        def export_chrome_trace(self, path: str, *args: Any, **kwargs: Any) -> None:
            super().export_chrome_trace(path, *args, **kwargs)
            Path(path).rename(tmp_path / "uploaded.json")

    trained(Uploading).export_chrome_trace(str(tmp_path / "t.json"))
    assert rows(read(tmp_path / "uploaded.json"))


def test_a_profiler_goes_with_its_last_user() -> None:
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        with torch.autograd.profiler.profile() as profiler:
            train(2)
        assert "export_chrome_trace" in vars(profiler)
        known = weakref.ref(profiler)
        del profiler
        assert known() is None


def test_a_log_that_cannot_start_is_told_and_the_profile_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def fails() -> None:
        raise umem.UmemError("no stream")

    monkeypatch.setattr(core, "start_transfer_log", fails)
    with (
        caplog.at_level(logging.WARNING, logger="umem"),
        umem.enable(budget="24MiB", device="soft", policy="lru"),
    ):
        trace = profiled(tmp_path / "t.json", steps=1)
    assert "a profile has no rows for umem's transfers: no stream" in caplog.text
    assert [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]


def test_a_trace_without_room_for_rows_stays_as_torch_wrote_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with (
        caplog.at_level(logging.WARNING, logger="umem"),
        umem.enable(budget="24MiB", device="soft", policy="lru"),
    ):
        trace = profiled(tmp_path / "t.json")
    assert rows(trace) == []
    assert [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    assert "umem's transfers are not in" in caplog.text
    assert "No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == [tmp_path / "t.json"]


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
    profiler_rows.add_rows(path, [(0, "bring in", MIB, 3000, 5500)])
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
    with pytest.raises(ValueError, match="another form"):
        profiler_rows.add_rows(path, [(0, "bring in", MIB, 3000, 5500)])
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_rounded_times_of_a_lane_do_not_overlap(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"baseTimeNanoseconds": 0, "traceEvents": []}')
    transfers = [
        (0, "bring in", MIB, 1000, 9000),
        (0, "send out", MIB, 4000, 9500),
        (0, "bring in", MIB, 5000, 7000),
        (1, "bring in", MIB, 2000, 8000),
    ]
    profiler_rows.add_rows(path, transfers)
    found = {(e["pid"], e["ts"], e["dur"]) for e in rows(read(path))}
    assert found == {
        ("umem 0", 1.0, 4.0), ("umem 0", 4.0, 5.5), ("umem 0", 5.0, 2.0), ("umem 1", 2.0, 6.0)
    }  # fmt: skip


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "pipe.json"
    os.mkfifo(path)
    with pytest.raises(ValueError, match="not a regular file"):
        profiler_rows.add_rows(path, [(0, "bring in", MIB, 3000, 5500)])


def test_a_link_stays_one_and_a_file_keeps_its_mode(tmp_path: Path) -> None:
    path, link = tmp_path / "t.json", tmp_path / "link.json"
    path.write_text('{"baseTimeNanoseconds": 1000, "traceEvents": []}')
    path.chmod(0o640)
    link.symlink_to(path)
    profiler_rows.add_rows(link, [(0, "bring in", MIB, 3000, 5500)])
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert rows(read(path))
