"""torch's memory snapshots and history under umem."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.gpu import needs_torch  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("umem_on")]
MIB = 1 << 20


def make_tensor(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


@pytest.fixture(autouse=True)
def _no_history(umem_on: object) -> Iterator[None]:
    torch.cuda.init()
    torch.cuda.empty_cache()
    yield
    torch.cuda.memory._record_memory_history(enabled=None)


def trace() -> list[dict[str, Any]]:
    return torch.cuda.memory._snapshot()["device_traces"][0]


def names(frames: list[dict[str, Any]]) -> list[str]:
    return [frame["name"] for frame in frames]


def test_memory_snapshot_lists_segments_and_blocks() -> None:
    x, small = make_tensor(8), torch.empty(1000, dtype=torch.uint8, device="cuda")
    segments = {segment["address"]: segment for segment in torch.cuda.memory_snapshot()}
    large = segments[x.data_ptr()]
    assert large["total_size"] == large["allocated_size"] == large["active_size"] == 8 * MIB
    assert large["segment_type"] == "large"
    assert large["device"] == 0
    assert [block["state"] for block in large["blocks"]] == ["active_allocated"]
    assert large["blocks"][0]["requested_size"] == 8 * MIB
    holding = segments[small.data_ptr() // (2 * MIB) * (2 * MIB)]
    assert holding["segment_type"] == "small"
    states = {block["address"]: block["state"] for block in holding["blocks"]}
    assert states[small.data_ptr()] == "active_allocated"
    assert sum(block["size"] for block in holding["blocks"]) == holding["total_size"] == 2 * MIB
    del x
    cached = {segment["address"]: segment for segment in torch.cuda.memory_snapshot()}
    assert cached[large["address"]]["allocated_size"] == 0
    assert [block["state"] for block in cached[large["address"]]["blocks"]] == ["inactive"]
    del small


def test_sums_of_the_snapshot_are_the_statistics() -> None:
    kept = [make_tensor(4), *(torch.empty(3000, device="cuda") for _ in range(5))]
    segments = torch.cuda.memory_snapshot()
    assert sum(s["total_size"] for s in segments) == torch.cuda.memory_reserved()
    assert sum(s["allocated_size"] for s in segments) == torch.cuda.memory_allocated()
    del kept


def test_history_has_the_sizes_that_were_asked_for() -> None:
    """Like torch's own: readers of a trace expect a tensor's bytes, not those of its block."""
    torch.cuda.memory._record_memory_history(max_entries=1000)
    asked = [1000, 3 * MIB + 5]
    tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in asked]
    del tensors
    for action in ("alloc", "free_requested", "free_completed"):
        assert sorted(e["size"] for e in trace() if e["action"] == action) == asked
    segments = {e["size"] for e in trace() if e["action"] == "segment_alloc"}
    assert segments == {2 * MIB, 4 * MIB}


def test_history_has_each_event_with_its_stack() -> None:
    torch.cuda.memory._record_memory_history(max_entries=1000, stacks="python")
    x = make_tensor(8)
    address = x.data_ptr()
    del x
    torch.cuda.empty_cache()
    events = trace()
    assert [(e["action"], e["addr"], e["size"]) for e in events if e["action"] != "snapshot"] == [
        ("segment_alloc", address, 8 * MIB),
        ("alloc", address, 8 * MIB),
        ("free_requested", address, 8 * MIB),
        ("free_completed", address, 8 * MIB),
        ("segment_free", address, 8 * MIB),
    ]
    alloc = next(e for e in events if e["action"] == "alloc")
    assert "make_tensor" in names(alloc["frames"])
    freed = next(e for e in events if e["action"] == "free_requested")
    assert "test_history_has_each_event_with_its_stack" in names(freed["frames"])
    times = [e["time_us"] for e in events]
    assert times == sorted(times)


def test_a_block_that_another_stream_held_has_the_stack_of_its_allocation() -> None:
    """It is free once a later request finds the stream's work over, whoever makes that request."""
    torch.cuda.memory._record_memory_history(max_entries=1000, stacks="python")
    side = torch.cuda.Stream()
    x = make_tensor(8)
    address = x.data_ptr()
    with torch.cuda.stream(side):
        x.fill_(1)
    x.record_stream(side)
    del x
    torch.cuda.synchronize()
    other = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    (freed,) = [e for e in trace() if e["action"] == "free_completed" and e["addr"] == address]
    assert "make_tensor" in names(freed["frames"])
    del other


def test_live_blocks_know_where_they_were_made() -> None:
    torch.cuda.memory._record_memory_history(context="state", stacks="python")
    x = make_tensor(8)
    (segment,) = [s for s in torch.cuda.memory_snapshot() if s["address"] == x.data_ptr()]
    assert "make_tensor" in names(segment["blocks"][0]["frames"])
    assert "make_tensor" in names(segment["frames"])
    assert all(not e.get("frames") for e in trace() if e["action"] == "alloc")
    del x


def test_history_is_bounded_and_can_skip_and_clear() -> None:
    history = torch.cuda.memory._record_memory_history
    history(max_entries=3, stacks="python")
    for _ in range(5):
        make_tensor(2)
    assert len([e for e in trace() if e["action"] != "snapshot"]) == 3
    history(max_entries=100, stacks="python", clear_history=True, skip_actions=["free_requested"])
    make_tensor(2)
    actions = [e["action"] for e in trace() if e["action"] != "snapshot"]
    assert actions == ["alloc", "free_completed"]
    history(enabled=None)
    make_tensor(2)
    assert trace() == []


def test_an_out_of_memory_is_in_the_history() -> None:
    torch.cuda.memory._record_memory_history(stacks="python")
    with pytest.raises(torch.OutOfMemoryError):
        make_tensor(1 << 30)
    (event,) = [e for e in trace() if e["action"] == "oom"]
    assert event["size"] == (1 << 30) * MIB
    assert 0 < event["device_free"] <= torch.cuda.mem_get_info()[1]
    assert "make_tensor" in names(event["frames"])


def test_dump_snapshot_writes_what_snapshot_says(tmp_path: Path) -> None:
    torch.cuda.memory._record_memory_history(stacks="python")
    x = make_tensor(8)
    path = tmp_path / "snapshot.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    written = pickle.loads(path.read_bytes())
    assert x.data_ptr() in [segment["address"] for segment in written["segments"]]
    assert "alloc" in [event["action"] for event in written["device_traces"][0]]
    del x


def test_private_pools_are_in_the_snapshot_too() -> None:
    torch.cuda.memory._record_memory_history(stacks="python")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = make_tensor(8)
    outside = make_tensor(4)
    owners = {
        block["address"]: segment["segment_pool_id"]
        for segment in torch.cuda.memory._snapshot()["segments"]
        for block in segment["blocks"]
    }
    assert owners[inside.data_ptr()] == pool.id
    assert owners[outside.data_ptr()] == (0, 0)
    assert {inside.data_ptr(), outside.data_ptr()} <= {
        e["addr"] for e in trace() if e["action"] == "alloc"
    }
    assert [s["address"] for s in pool.snapshot()] == [
        a for a, owner in owners.items() if owner == pool.id and a == inside.data_ptr()
    ]
    del inside, outside


def test_metadata_is_that_of_the_thread() -> None:
    torch.cuda.memory._record_memory_history(stacks="python")
    torch.cuda.memory._set_memory_metadata("mine")
    try:
        x = make_tensor(8)
        other = threading.Thread(target=make_tensor, args=(4,))
        other.start()
        other.join()
        assert torch.cuda.memory._get_memory_metadata() == "mine"
    finally:
        torch.cuda.memory._set_memory_metadata("")
    seen = {e["size"]: e["user_metadata"] for e in trace() if e["action"] == "alloc"}
    assert seen == {8 * MIB: "mine", 4 * MIB: ""}
    del x


@needs_torch("2.14")
def test_a_live_tensor_can_be_annotated() -> None:
    assert torch.cuda.memory._memory_metadata_supported()
    before = make_tensor(2)
    torch.cuda.memory._record_memory_history(stacks="python")
    x = make_tensor(8)
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        inside = make_tensor(4)
    for tensor in (before, x[MIB:], inside):
        torch.cuda.memory._annotate_tensor(tensor, "saved for backward")
    notes = [e for e in trace() if e["action"] == "annotate"]
    assert [(e["addr"], e["size"]) for e in notes] == [
        (x.data_ptr(), 8 * MIB),
        (inside.data_ptr(), 4 * MIB),
    ]
    assert {e["user_metadata"] for e in notes} == {"saved for backward"}
    assert all("_annotate_tensor" in names(e["frames"]) for e in notes)
    del before, x, inside
