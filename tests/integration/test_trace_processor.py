"""Perfetto's own trace processor reads umem's files with the same meaning."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from support import synthetic, trace_processor

import umem
from umem.trace import perfetto
from umem.trace.info import LiveBytes
from umem.trace.schema import Alloc, Event, Free, Header, Op

MIB = 1 << 20
pytestmark = pytest.mark.skipif(
    not trace_processor.UI, reason="needs Perfetto's trace processor: make test-perfetto"
)
PROBLEMS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
SLICES = """
select thread.name as row, slice.name, ts, dur, depth
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
order by ts, slice.id
"""
LAST_VALUES = """
select process_counter_track.name, value from counter
join process_counter_track on counter.track_id = process_counter_track.id
order by counter.id
"""
TRACES = {
    "training": [*synthetic.training(8, 3 << 20, 5 << 20, 3, us=123.4567, optimizer=True)],
    "random": [*synthetic.random_trace(0, ops=400)],
}


def exported(*traces: list[Event]) -> bytes:
    stream = io.StringIO()
    shown = [perfetto.Shown(f"rank {i}", Header(), events) for i, events in enumerate(traces)]
    perfetto.write(stream, shown)
    return stream.getvalue().encode()


@pytest.mark.parametrize("name", TRACES)
def test_each_op_is_a_slice_beside_the_others(name: str) -> None:
    events = TRACES[name]
    problems, slices = trace_processor.ask(exported(events), PROBLEMS, SLICES)
    assert problems == []
    drawn = [row for row in slices if row["row"] == "ops"]
    ops = [event for event in events if isinstance(event, Op)]
    assert [row["name"] for row in drawn] == [op.name for op in ops]
    for row, op in zip(drawn, ops, strict=True):
        us = perfetto.UNKNOWN_US if op.us is None else op.us
        assert row["dur"] == pytest.approx(1e3 * us, abs=2)
    for begin, end in zip(drawn[1:], drawn, strict=False):
        assert begin["ts"] == pytest.approx(end["ts"] + end["dur"], abs=2)
    assert {row["depth"] for row in slices} == {0}
    assert [row["name"] for row in slices if row["row"] == "steps"] == [
        "step 0",
        "step 1",
        "step 2",
    ]


@pytest.mark.parametrize("name", TRACES)
def test_the_last_values_of_the_counters_are_what_stays(name: str) -> None:
    memory = LiveBytes()
    for event in TRACES[name]:
        if isinstance(event, Alloc):
            memory.alloc(event)
        elif isinstance(event, Free):
            memory.free(event.id)
    (rows,) = trace_processor.ask(exported(TRACES[name]), LAST_VALUES)
    left = {row["name"].removeprefix("live bytes ").strip(): row["value"] for row in rows}
    assert {tag: count for tag, count in left.items() if count} == {
        tag or "untagged": count for tag, count in memory.by_tag.items() if count
    }


def test_each_trace_is_a_process() -> None:
    problems, processes = trace_processor.ask(
        exported(*TRACES.values()), PROBLEMS, "select name from process where name is not null"
    )
    assert problems == []
    assert sorted(row["name"] for row in processes) == ["rank 0", "rank 1"]


def test_what_is_no_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="trace type"):
        trace_processor.ask(b"no trace", PROBLEMS)


def test_transfers_in_a_profile_have_rows(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "t.json"
    with umem.enable(budget="24MiB", device="soft", policy="lru"):
        kept = [torch.ones(MIB) for _ in range(12)]
        with torch.profiler.profile() as profiler:
            for tensor in kept:
                tensor.add_(1)
        profiler.export_chrome_trace(str(path))
        del kept, tensor
    named = "select process.name as device, thread.name as row, slice.name as what from slice "
    named += "join thread_track on slice.track_id = thread_track.id join thread using (utid) "
    named += "join process using (upid) where slice.category = 'umem'"
    # This version of the processor finds nothing after torch's keys before the events.
    events = {"traceEvents": json.loads(path.read_text())["traceEvents"]}
    (found,) = trace_processor.ask(json.dumps(events).encode(), named)
    assert {row["device"] for row in found} == {"umem, device 0"}
    assert {("to the device", "bring in 4 MiB"), ("to the host", "send out 4 MiB")} <= {
        (row["row"], row["what"]) for row in found
    }
