"""Blocks under umem: raw ones, empty ones, those of several streams and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from softcuda.load import Softcuda  # noqa: E402
from support.cuda_tensors import full, holds  # noqa: E402

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("umem_on")]
MIB = 1 << 20


def test_torch_gets_its_memory_from_umem() -> None:
    x = torch.empty(10, device="cuda")
    assert core.owns(x.data_ptr())
    assert torch.cuda.get_allocator_backend() == "umem"
    del x


def test_caching_allocator_alloc_and_delete() -> None:
    torch.cuda.init()
    before = umem.stats()
    address = torch.cuda.caching_allocator_alloc(3 * MIB)
    assert core.owns(address)
    assert umem.stats().live_bytes - before.live_bytes == 4 * MIB
    assert torch.cuda.memory_allocated() == 4 * MIB
    stream = torch.cuda.Stream()
    other = torch.cuda.caching_allocator_alloc(1000, stream=stream)
    assert core.owns(other)
    for block in (address, other):
        torch.cuda.caching_allocator_delete(block)
    assert umem.stats().live_bytes == before.live_bytes


def test_torchs_own_trace_of_memory_goes_on(program: Callable[..., tuple[str, str]]) -> None:
    program(
        """
        from torch.cuda import _gpu_trace
        enable()
        seen = []
        _gpu_trace.register_callback_for_memory_allocation(lambda ptr: seen.append(("new", ptr)))
        _gpu_trace.register_callback_for_memory_deallocation(lambda ptr: seen.append(("old", ptr)))
        torch._C._activate_gpu_trace()
        x = torch.empty(MIB, device="cuda")
        address = x.data_ptr()
        del x
        assert seen == [("new", address), ("old", address)], seen
        """
    )


def test_requests_of_no_bytes() -> None:
    before = umem.stats().allocs
    for tensor in (torch.empty(0, device="cuda"), torch.empty(3, 0, 2, device="cuda")):
        assert tensor.data_ptr() == 0
        assert tensor.device == torch.device("cuda", 0)
        assert tensor.cpu().numel() == 0
        assert tensor.clone().shape == tensor.shape
    assert torch.cuda.caching_allocator_alloc(0) == 0
    torch.cuda.caching_allocator_delete(0)
    assert umem.stats().allocs == before


def test_a_storage_that_grows() -> None:
    x = full(3.0)
    x.resize_(2 * x.numel())
    assert holds(x[: MIB // 2], 3.0)
    assert core.owns(x.data_ptr())
    del x


def test_base_allocation_is_the_segment() -> None:
    small = [torch.empty(1000, dtype=torch.uint8, device="cuda") for _ in range(3)]
    segments = torch.cuda.memory_snapshot()
    for tensor in small:
        base = tensor.data_ptr() // (2 * MIB) * (2 * MIB)
        assert base in [segment["address"] for segment in segments]
    del small


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_record_stream_keeps_the_block_until_the_other_stream_is_done(
    soft: Softcuda | None, seed: int
) -> None:
    if soft is not None:
        soft.seed(seed)
    side = torch.cuda.Stream()
    for value in range(10):
        x = full(float(value))
        address = x.data_ptr()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy = x.clone()
            copy = copy.clone()
            y = x.clone()
        x.record_stream(side)
        del x
        z = full(-1.0)  # in its place, if umem did not wait
        torch.cuda.current_stream().wait_stream(side)
        assert holds(y, float(value)), (z.data_ptr() == address, value)
        del copy, y, z


def test_a_block_in_use_elsewhere_is_active_but_not_allocated(softcuda: Softcuda) -> None:
    softcuda.seed(5)  # so that the work is not done before the check
    side = torch.cuda.Stream()
    x = full(1.0, mib=8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x.clone()
    x.record_stream(side)
    address = x.data_ptr()
    del x
    states = {
        block["address"]: block["state"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
    }
    assert states[address] == "active_pending_free"
    torch.cuda.synchronize()
    del y


def test_threads_that_allocate_and_free_each_others_blocks() -> None:
    errors: list[str] = []
    shared: list[torch.Tensor | None] = [None] * 8

    def work(number: int) -> None:
        for i in range(60):
            value = float(number * 100 + i)
            tensor = torch.full((1 + (i % 5) * MIB // 8,), value, device="cuda")
            if not holds(tensor, value):
                errors.append(f"thread {number}, round {i}")
            shared[(number + i) % len(shared)] = tensor  # frees another thread's

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared.clear()
    assert errors == []
    assert umem.stats().live_bytes == 0


def test_the_backward_thread_allocates_from_umem() -> None:
    seen: list[tuple[int, bool]] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            result = grad.clone()
            seen.append((threading.get_ident(), core.owns(result.data_ptr())))
            return result

    x = torch.full((MIB,), 2.0, device="cuda", requires_grad=True)
    Double.apply(x).backward(torch.full((MIB,), 3.0, device="cuda"))
    assert x.grad is not None
    assert holds(x.grad, 3.0)
    ((thread, owned),) = seen
    assert owned
    assert thread != threading.get_ident()
    del x
