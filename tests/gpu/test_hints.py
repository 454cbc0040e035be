"""Hints on CUDA tensors: ordered by streams like work of the program, and no byte lost.

On the software driver work is done late and in a random legal order, so that a wait that umem
forgot shows as wrong bytes.
"""

from __future__ import annotations

import ctypes
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from softcuda.load import Softcuda  # noqa: E402
from support.cuda_tensors import full, holds  # noqa: E402

import umem  # noqa: E402
from umem.errors import ConfigError, OutOfMemoryError, StateError  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("umem_on")]
MIB = 1 << 20
SEEDS = pytest.mark.parametrize("seed", [1, 2, 3, 4])


def defer(soft: Softcuda | None, seed: int) -> None:
    if soft is not None:
        soft.seed(seed)


def press(mib: int) -> None:
    held = [full(float(i), mib=8) for i in range(mib // 8)]
    assert all(holds(t, float(i)) for i, t in enumerate(held))


@SEEDS
def test_what_is_written_after_a_discard_stays(soft: Softcuda | None, seed: int) -> None:
    defer(soft, seed)
    tensors = [full(1.0, mib=4) for _ in range(6)]
    for i, t in enumerate(tensors):
        t.fill_(2.0)
        assert umem.discard(t) == 4 * MIB
        t.fill_(float(i))
    press(64)
    assert [holds(t, float(i)) for i, t in enumerate(tensors)] == [True] * 6


@SEEDS
def test_a_discard_is_ordered_on_the_current_stream(soft: Softcuda | None, seed: int) -> None:
    defer(soft, seed)
    home, side, last = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    for value in range(8):
        t = full(-1.0, mib=8)
        copy = torch.empty_like(t)
        side.wait_stream(home)
        with torch.cuda.stream(side):
            t.fill_(-2.0)
            copy.copy_(t)
            umem.discard(t)  # after the copy, and before what waits for this stream
        last.wait_stream(side)
        with torch.cuda.stream(last):
            t.fill_(float(value))
        home.wait_stream(last)
        assert holds(copy, -2.0)
        assert holds(t, float(value))


@SEEDS
def test_a_write_that_umem_brings_nothing_in_for_waits_too(
    soft: Softcuda | None, seed: int
) -> None:
    defer(soft, seed)
    tensors = [full(1.0, mib=8) for _ in range(6)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):  # no observer sees its replays
        tensors[0].fill_(7.0)
    for value in range(4):
        umem.discard(tensors[0])
        graph.replay()
        for i, t in enumerate(tensors[1:]):
            umem.discard(t[MIB:])  # a part: the rest is still there
            t.fill_(float(value + i))
        assert holds(tensors[0], 7.0)
        assert [holds(t, float(value + i)) for i, t in enumerate(tensors[1:])] == [True] * 5
    graph.reset()


@SEEDS
def test_a_discard_of_evicted_bytes(soft: Softcuda | None, seed: int) -> None:
    defer(soft, seed)
    t, neighbour = full(1.0, mib=8), full(3.0, mib=8)
    umem.evict([t, neighbour])
    assert umem.discard(t) == 8 * MIB
    assert umem.where(t).discarded_bytes == 8 * MIB
    before = umem.stats().bytes_in
    t.fill_(2.0)
    assert umem.stats().bytes_in == before
    assert holds(t, 2.0)
    assert holds(neighbour, 3.0)


def test_a_discard_of_a_view_takes_no_other_byte() -> None:
    t = full(1.0, mib=12)
    begin, end = MIB // 4 + 3, 11 * MIB // 4 - 5
    assert umem.discard(t[begin:end]) == 8 * MIB
    press(80)
    assert holds(t[:begin], 1.0)
    assert holds(t[end:], 1.0)
    with pytest.raises(ConfigError, match="no page of 2 MiB"):
        umem.discard(torch.zeros(10, device="cuda"))


@SEEDS
def test_pinned_tensors_stay_and_keep_their_bytes(soft: Softcuda | None, seed: int) -> None:
    defer(soft, seed)
    pinned, other = full(5.0, mib=16), full(6.0, mib=8)
    umem.evict(pinned)
    with umem.pin(pinned):
        press(80)
        assert umem.where(pinned).resident_bytes == 16 * MIB
        assert umem.where(other).resident_bytes == 0
        with pytest.raises(StateError, match="pinned"):
            umem.evict(pinned)
        with pytest.raises(OutOfMemoryError, match="cannot pin"):
            umem.pin(full(0.0, mib=48))
    assert holds(pinned, 5.0)
    press(80)
    assert umem.where(pinned).resident_bytes == 0
    assert holds(pinned, 5.0)
    assert holds(other, 6.0)


def test_transfers_are_in_flight_until_they_end(softcuda: Softcuda) -> None:
    softcuda.seed(3)  # work is done when a thread waits for it
    t, go_on = full(1.0, mib=8), threading.Event()
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: go_on.wait(30))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert softcuda.driver.cuLaunchHostFunc(stream, callback, None) == 0
    t.fill_(2.0)  # it cannot leave before that
    umem.evict(t)
    row = umem.where(t)
    assert (row.evicted_bytes, row.leaving_bytes) == (8 * MIB, 8 * MIB)
    go_on.set()
    deadline = time.monotonic() + 30  # the transfer queue's thread may not have issued it yet
    while umem.where(t).leaving_bytes and time.monotonic() < deadline:
        torch.cuda.synchronize()
    row = umem.where(t)
    assert (row.evicted_bytes, row.leaving_bytes) == (8 * MIB, 0)
    assert holds(t, 2.0)


def test_a_capture_takes_hints_on_what_is_there_but_no_discard() -> None:
    t, other = full(1.0, mib=8), full(2.0, mib=8)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        t.fill_(3.0)
        with pytest.raises(StateError, match="captured"):
            umem.discard(other)
        assert umem.evict(other)
        assert umem.prefetch(other)
        with umem.pin(other):
            assert umem.where(other).pins == 1
    graph.replay()
    assert holds(t, 3.0)
    assert holds(other, 2.0)
    graph.reset()


def test_cpu_tensors_are_not_umems_here() -> None:
    t = torch.ones(MIB)
    for hint in (umem.prefetch, umem.evict, umem.pin, umem.keep, umem.exclude, umem.discard):
        assert not hint(t)
    assert not umem.where(t).held


def test_modules_rules_and_scopes() -> None:
    with umem.scope("net"):
        net = torch.nn.Linear(2048, 1024, device="cuda")
    with umem.exclude(tag="param"), umem.keep(net):
        press(80)
        row, bias = umem.tensors(net)
        assert (row.scope, row.tag, row.resident_bytes) == ("net", "param", 8 * MIB)
        assert (bias.tag, row.excluded, row.pins) == ("pool", True, 1)
    assert "net" in str(umem.tensors())
