"""``umem replay`` of a trace of several devices: each as if it was alone, and all together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import recorded, schemas, synthetic

from umem import simulate
from umem.base import device_profiles, nodes
from umem.cli import main
from umem.errors import ConfigError, TraceError
from umem.simulation import replay
from umem.trace.device_split import DeviceSplit
from umem.trace.event_columns import by_step
from umem.trace.ids import BlockId
from umem.trace.schema import Alloc, Event, Free, Op, Step
from umem.trace.step_builder import last_step

PAGE = 2 << 20
SECOND = 1 << 20  # the second device's ids


def _moved(event: Event) -> Event:
    """Return the event as one of the second device."""
    if isinstance(event, Alloc):
        return dataclasses.replace(event, id=BlockId(event.id + SECOND), device=1)
    if isinstance(event, Free):
        return dataclasses.replace(event, id=BlockId(event.id + SECOND))
    if isinstance(event, Op):
        reads, writes = (
            tuple(BlockId(b + SECOND) for b in ids) for ids in (event.reads, event.writes)
        )
        return dataclasses.replace(event, reads=reads, writes=writes)
    return event


def both() -> list[Event]:
    """Two steps, each with two networks that train together; the second one is smaller."""
    found: list[Event] = []
    for first, second in zip(
        _steps(synthetic.training(6, 2 * PAGE, 4 * PAGE, 2, us=300.0)),
        _steps(synthetic.training(4, 2 * PAGE, 2 * PAGE, 2, us=200.0)),
        strict=True,
    ):
        found += [*first, *map(_moved, second)]
        if any(isinstance(event, Op) for event in first):
            found.append(Step())
    return found


def _steps(events: Any) -> Iterator[list[Event]]:
    now: list[Event] = []
    for event in events:
        if isinstance(event, Step):
            yield now
            now = []
        else:
            now.append(event)
    yield now


def split_of(device: int) -> list[Event]:
    one = DeviceSplit()
    return [event for step in by_step(both()) for event in recorded.events(one.take(step)[device])]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return synthetic.write(tmp_path / "two.jsonl", both())


def rows_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["replay", *words, "--json"]) == 0
    rows = [schemas.read("replay", line) for line in capsys.readouterr().out.splitlines()]
    for row in rows:
        row.pop("events_per_s", None)
    return rows


def test_each_device_is_replayed_as_its_split_alone(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *rows, _, _ = rows_of(capsys, str(path), "--budget", "60%", "--policy", "lru", "auto")
    a100 = device_profiles.find("a100-pcie4")
    assert [(row.pop("trace_device"), row["policy"]) for row in rows] == [
        (0, "lru"), (0, "auto"), (1, "lru"), (1, "auto"),
    ]  # fmt: skip
    for row, device in zip(rows, (0, 0, 1, 1), strict=True):
        step = last_step(split_of(device))
        budget = int(step.peak_bytes * 0.6)
        alone = replay.replay_step(step, row["policy"], a100, budget).as_dict()
        del alone["events_per_s"]
        assert row == alone
    assert rows[0]["budget"] > rows[2]["budget"]
    assert rows[1]["bytes_in"] > 0


def test_the_total_has_the_slowest_device_and_all_bytes(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, total = rows_of(capsys, str(path), "--budget", "60%")
    assert total["trace_device"] == "all"
    assert total["step_us"] == max(first["step_us"], second["step_us"])
    for name in ("bytes_in", "bytes_out", "budget", "peak_host"):
        assert total[name] == first[name] + second[name]
    assert total["peak_host"] > 0


def test_devices_of_a_node_share_its_links(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(path), "--budget", "60%")
    own = rows_of(capsys, *words, "--link", "12.5", "--device", "a100-pcie4")
    shared = rows_of(capsys, *words, "--node", "a100-pcie4x4")  # two on a link of 25 GB/s
    for one, other in zip(own, shared, strict=True):
        assert other["device"] == "a100-pcie4x4/2"
        assert {**one, "device": ""} == {**other, "device": ""}
    assert rows_of(capsys, *words, "--node", "a100-pcie4x4", "--busy", "4") != shared


def test_the_text_has_a_table_for_each_device(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(path), "--budget", "60%", "--policy", "lru", "auto"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("device ")] == [
        ["device", "0"], ["device", "1"],
    ]  # fmt: skip
    assert out.count("/compute") == 2
    assert "all devices: the slowest one's time" in out


def test_a_trace_of_one_device_has_no_total(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = synthetic.write(tmp_path / "one.jsonl", split_of(1))
    (row,) = rows_of(capsys, str(name), "--node", "a100-pcie4x4")
    assert "trace_device" not in row
    assert row["device"] == "a100-pcie4"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--busy", "2"], "--busy needs --node"),
        (["--node", "h200x8", "--busy", "1"], "at least the trace's 2 devices"),
        (["--node", "h200x8", "--busy", "9"], "allowed: 1 to 8"),
        (["--node", "h200x8", "--device", "h200-pcie5"], "--node has its own device"),
        (["--node", "h200"], "there is no node 'h200'"),
    ],
)
def test_options_that_do_not_go_together(
    path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(["replay", str(path), *words]) == 2
    assert says in capsys.readouterr().err


def test_a_simulation_takes_one_device_of_a_busy_node(path: Path) -> None:
    step = last_step(split_of(0))
    node = nodes.find("a100-pcie4x4")
    assert simulate(step, device="a100-pcie4x4").step_us == simulate(
        step, device=node.profile(4)
    ).step_us  # fmt: skip
    assert simulate(step, device="a100-pcie4x4").device == "a100-pcie4x4/4"
    with pytest.raises(TraceError, match="a trace of devices 0, 1"):
        simulate(path)
    with pytest.raises(ConfigError, match="no device profile 'a100x4'"):
        simulate(step, device="a100x4")
