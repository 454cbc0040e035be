"""umem's transfers on a GPU are rows in the Chrome traces of torch.profiler, timed by events."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
Program = Callable[..., tuple[str, str]]

PREAMBLE = """
import json, tempfile, time
from torch.profiler import ProfilerActivity, profile
from umem.base.native import core
def rows(profiler):
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/t.json")
        with open(f"{folder}/t.json") as stream:
            trace = json.load(stream)
    return [event for event in trace["traceEvents"] if event.get("cat") == "umem"], trace
def settle(tensors):
    # A thread gives out what leaves ahead of need: the device may not know of it yet.
    while any(umem.where(tensor).leaving_bytes for tensor in tensors):
        time.sleep(0.001)
    torch.cuda.synchronize()
def use(tensors):
    for _ in range(2):
        for tensor in tensors:
            tensor.add_(0)
    settle(tensors)
"""


def test_each_transfer_is_a_slice_of_its_lane(program: Program) -> None:
    program(
        PREAMBLE
        + """
with enable(policy="lru"):
    tensors = blocks(24)
    settle(tensors)  # else the profile has rows of bytes that were counted before it
    before = umem.stats()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        use(tensors)

    after = umem.stats()
    found, trace = rows(profiler)
    by_row = [sorted((e["ts"], e["dur"], e["args"]["bytes"]) for e in found if e["tid"] == row)
              for row in (0, 1)]
    assert sum(size for _, _, size in by_row[0]) == after.bytes_in - before.bytes_in > 0
    assert sum(size for _, _, size in by_row[1]) == after.bytes_out - before.bytes_out > 0
    for row in by_row:
        for (begin, lasted, _), (following, _, _) in zip(row, row[1:]):
            assert begin + lasted <= following + 1, (begin, lasted, following)
    ops = [e for e in trace["traceEvents"] if e.get("cat") == "cpu_op"]
    first = min(e["ts"] for e in ops)
    last = max(e["ts"] + e["dur"] for e in ops)
    assert all(first - 1e4 < e["ts"] < last + 1e6 for e in found), (first, last, found[:3])
    assert intact(tensors)
"""
    )


def test_a_device_that_is_first_used_in_the_profile_has_rows(program: Program) -> None:
    program(
        PREAMBLE
        + """
with enable(policy="lru"):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        tensors = blocks(24)
        use(tensors)
    found, _ = rows(profiler)
    assert {event["pid"] for event in found} == {"umem 0"}
    assert {event["tid"] for event in found} >= {0, 1}
"""
    )


def test_what_the_device_has_not_done_is_not_drawn(program: Program) -> None:
    program(
        PREAMBLE
        + """
driver = soft.driver if soft else ctypes.CDLL("libcuda.so.1")
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
go_on = threading.Event()
with enable(policy="lru"):
    tensors = blocks(12)
    torch.cuda.synchronize()
    core.start_transfer_log()
    umem.prefetch(tensors[0])
    callback = CALLBACK(lambda _: go_on.wait())
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert driver.cuLaunchHostFunc(stream, callback, None) == 0
    tensors += blocks(12)  # others leave for them, after what the stream holds
    umem.prefetch(tensors[0])
    found, left_out = core.take_transfer_log()
    go_on.set()
    torch.cuda.synchronize()
    assert left_out == 0
    assert not [row for row in found if row[1] == "send out"], found
    assert core.take_transfer_log() == ([], 0)
    assert intact(tensors[:12])
"""
    )
