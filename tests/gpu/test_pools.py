"""Private pools under umem: plain device memory of torch's own allocator, counted to the budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from softcuda.load import Softcuda  # noqa: E402
from support.cuda_tensors import full, holds  # noqa: E402
from support.gpu import needs_torch  # noqa: E402

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("umem_on")]
MIB = 1 << 20


def test_a_pool_made_before_the_first_allocation_counts_towards_the_budget() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = full(1.0, mib=32)
    outside = [full(float(i), mib=4) for i in range(12)]  # 48 MiB in addition to 32 of 64
    assert umem.stats().resident_bytes <= 32 * MIB
    assert umem.stats().evictions > 0
    assert holds(inside, 1.0)
    assert all(holds(t, float(i)) for i, t in enumerate(outside))


def test_a_mem_pool_is_not_managed_and_lives_as_long_as_its_tensors() -> None:
    pool = torch.cuda.MemPool()
    assert pool.use_count() == 1
    with torch.cuda.use_mem_pool(pool):
        inside = full(1.0)
        nested = torch.empty_like(inside)
    outside = full(2.0)
    assert not core.owns(inside.data_ptr())
    assert not core.owns(nested.data_ptr())
    assert core.owns(outside.data_ptr())
    assert holds(inside, 1.0)
    assert holds(outside, 2.0)
    del pool
    assert holds(inside, 1.0)


def test_statistics_are_of_both() -> None:
    torch.cuda.init()
    before = torch.cuda.memory_allocated()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = full(1.0, mib=4)
    outside = full(2.0, mib=8)
    assert torch.cuda.memory_allocated() - before == 12 * MIB
    assert umem.stats().live_bytes == 8 * MIB
    del inside, outside


def test_a_pool_counts_towards_the_budget() -> None:
    kept = [full(float(i), mib=8) for i in range(7)]  # 56 of 64 MiB
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = full(-1.0, mib=32)
    kept.append(full(7.0, mib=2))
    assert umem.stats().resident_bytes <= 32 * MIB
    assert umem.stats().evictions > 0
    assert all(holds(t, float(i)) for i, t in enumerate(kept))
    assert holds(inside, -1.0)
    del inside, kept


def test_use_on_oom_and_no_split_are_handed_on() -> None:
    pool = torch.cuda.MemPool(use_on_oom=True, no_split=True)
    with torch.cuda.use_mem_pool(pool):
        x = full(1.0)
    assert holds(x, 1.0)
    del x, pool


def capture(value: float) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
    source = full(value)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        source.clone()  # warm up
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = source.clone()
    return graph, source, result


def test_a_graph_replays_into_memory_that_stays() -> None:
    graph, source, result = capture(1.0)
    assert core.owns(source.data_ptr())
    assert not core.owns(result.data_ptr())
    for value in (5.0, 6.0):
        source.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert holds(result, value)
    graph.reset()
    del graph, source, result


def test_two_graphs_share_a_pool_and_release_it() -> None:
    handle = torch.cuda.graph_pool_handle()
    source = full(4.0)
    graphs, results = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=handle):
            results.append(source.clone())
        graphs.append(graph)
        assert graph.pool() == handle
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()
    assert all(holds(result, 4.0) for result in results)
    reserved = torch.cuda.memory_reserved()
    results.clear()
    for graph in graphs:
        graph.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved
    del source, graph


def test_hints_go_on_after_a_capture() -> None:
    graph, source, result = capture(2.0)
    kept = [full(float(i), mib=8) for i in range(12)]  # 96 MiB in 64
    assert umem.stats().evictions > 0
    assert all(holds(t, float(i)) for i, t in enumerate(kept))
    graph.replay()
    torch.cuda.synchronize()
    assert holds(result, 2.0)
    del kept, graph, source, result


@pytest.mark.usefixtures("softcuda")
def test_a_capture_that_fails_is_over(program: Callable[..., tuple[str, str]]) -> None:
    """In its own process: torch before 2.13 keeps the memory of a capture that failed."""
    program(
        """
from umem.base.native import core
enable(budget="64MiB")
source = torch.full((MIB // 2,), 3.0, device="cuda")
pool = torch.cuda.graph_pool_handle()
for _ in range(2):  # the next captures use the same pool
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
            source.clone()
            torch.cuda.synchronize()
    except RuntimeError as error:
        assert "during capture" in str(error), error
    else:
        raise AssertionError("captured")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, pool=pool):
    result = source.clone()
graph.replay()
torch.cuda.synchronize()
assert bool(result.cpu().eq(3.0).all())
after = blocks(1)
assert core.owns(after[0].data_ptr())
steps = umem.stats().steps
umem.step()
assert umem.stats().steps == steps + 1
assert bool(source.cpu().eq(3.0).all()) and intact(after)
"""
    )


@needs_torch("2.15")
def test_a_conditional_body_allocates_from_the_graphs_pool(
    program: Callable[..., tuple[str, str]],
) -> None:
    """In its own process: memory reserved natively later remains reserved after it."""
    program(
        """
from umem.base.native import core
enable(budget="64MiB")
source = torch.full((MIB // 2,), 1.0, device="cuda")
wanted = torch.ones((), dtype=torch.bool, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    graph.begin_capture_to_if_node(wanted)
    inside = source.clone()
    graph.end_capture_to_conditional_node()
    after = source.clone()
kept = blocks(12, 8)  # 96 MiB in 64
assert umem.stats().evictions > 0
assert not core.owns(inside.data_ptr())
assert not core.owns(after.data_ptr())
for value, taken in [(5.0, True), (6.0, False)]:
    source.fill_(value)
    wanted.fill_(taken)
    graph.replay()
    torch.cuda.synchronize()
    assert bool(inside.cpu().eq(5.0).all())
    assert bool(after.cpu().eq(value).all())
assert intact(kept)
"""
    )


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_record_stream_of_a_block_in_a_pool(soft: Softcuda | None, seed: int) -> None:
    if soft is not None:
        soft.seed(seed)
    pool, side = torch.cuda.MemPool(), torch.cuda.Stream()
    for value in range(8):
        with torch.cuda.use_mem_pool(pool):
            x = full(float(value))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copies = [x.clone() for _ in range(3)]
        x.record_stream(side)
        del x
        with torch.cuda.use_mem_pool(pool):
            other = full(-1.0)  # in its place, if nothing waited
        torch.cuda.current_stream().wait_stream(side)
        assert all(holds(copy, float(value)) for copy in copies)
        del other, copies


def test_begin_end_and_release_by_hand() -> None:
    torch.cuda.init()
    handle = torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentThreadToPool(0, handle)
    inside = full(1.0)
    torch._C._cuda_endAllocateToPool(0, handle)
    outside = full(2.0)
    assert not core.owns(inside.data_ptr())
    assert core.owns(outside.data_ptr())
    assert holds(inside, 1.0)
    torch._C._cuda_releasePool(0, handle)
    del inside, outside


def test_the_state_of_a_pool_can_be_kept_and_set_again() -> None:
    torch.cuda.init()
    handle = torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentThreadToPool(0, handle)
    first = full(1.0)
    state = torch._C._cuda_getCheckpointState(0, handle)
    second = full(2.0)
    torch._C._cuda_endAllocateToPool(0, handle)
    both = {first.data_ptr(), second.data_ptr()}
    assert torch._C._cuda_checkPoolLiveAllocations(0, handle, both)
    torch._C._cuda_setCheckpointPoolState(0, state, [second.untyped_storage()._cdata], [])
    assert torch._C._cuda_checkPoolLiveAllocations(0, handle, {first.data_ptr()})
    assert holds(first, 1.0)
    del first, second
    torch._C._cuda_releasePool(0, handle)


def test_a_managed_block_cannot_be_shared_and_the_error_says_how() -> None:
    x = full(1.0)
    with pytest.raises(RuntimeError, match=r"use_mem_pool\(torch.cuda.MemPool\(\)\)"):
        x.untyped_storage()._share_cuda_()
    del x


def test_a_block_of_a_pool_can_be_shared(soft: Softcuda | None) -> None:
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        x = full(1.0)
    problem = ""
    try:
        assert x.untyped_storage()._share_cuda_()[0] == 0
    except RuntimeError as error:
        problem = str(error)
    # The software driver has no CUDA IPC: it is called, and reports that.
    assert ("not supported" in problem) if soft is not None else (problem == "")
    del x


def test_what_torch_freed_while_umem_was_off_counts_no_more(
    program: Callable[..., tuple[str, str]],
) -> None:
    program(
        """
        enable("64MiB")
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            x = torch.ones(8 * MIB, device="cuda")  # 32 MiB
        umem.disable()
        del x, pool
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        enable("64MiB")
        kept = blocks(20)  # 40 MiB
        assert intact(kept) and umem.stats().evictions == 0, umem.stats()
        """
    )


@pytest.mark.parametrize(("backing", "mib"), [("managed", 24), ("mapped", 24), ("mapped", 4)])
def test_a_pool_gets_memory_that_umem_gives_back(
    program: Callable[..., tuple[str, str]], softcuda: Softcuda, backing: str, mib: int
) -> None:
    """A pool's memory is torch's own, which does not know what umem could evict.

    It asks for 20 MiB of the driver for a tensor of 4.
    """
    program(
        f"""
enable(budget="56MiB", backing="{backing}")
held = blocks(9, 6)  # 54 of 64 MiB
torch.cuda.synchronize()
with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
    inside = torch.full(({mib} * MIB // 4,), 7.0, device="cuda")
assert bool(inside.cpu().eq(7.0).all()) and intact(held)
assert umem.stats().resident_bytes <= 36 * MIB, umem.stats()
with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
    try:
        torch.empty(64 * MIB, device="cuda")
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("more than the device has")
del inside
torch.cuda.empty_cache()
umem.prefetch(held)  # all of the budget is umem's again
torch.cuda.synchronize()
assert umem.stats().resident_bytes == 54 * MIB, umem.stats()
""",
        SOFTCUDA_BYTES=str(64 << 20),
    )


@pytest.mark.usefixtures("softcuda")
def test_umem_may_be_turned_off_but_not_on_inside_a_capture(
    program: Callable[..., tuple[str, str]],
) -> None:
    """The capture ends with torch's own allocator, and no later one is taken for it."""
    program(
        """
source = torch.full((MIB // 4,), 1.0, device="cpu")
for first in (True, False):  # on before the capture, or within it
    if first:
        enable()
    torch.cuda.init()
    here = source.to("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        here.add_(1)
        if first:
            umem.disable()
        try:
            enable()
        except umem.errors.StateError as error:
            assert "a CUDA graph is being captured" in str(error), error
        else:
            raise AssertionError("enabled")
    enable()
    steps = umem.stats().steps
    umem.step()
    assert umem.stats().steps == steps + 1, first
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again):
        here.add_(1)
        steps = umem.stats().steps
        umem.step()
        assert umem.stats().steps == steps, first
    graph.reset()
    again.reset()
    del here
    umem.disable()
"""
    )
