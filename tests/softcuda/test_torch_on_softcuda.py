"""The unmodified CUDA build of torch on the software driver, with its own allocator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from softcuda.programs import reason_without_torch, torch_program

pytestmark = pytest.mark.skipif(
    reason_without_torch() is not None, reason=str(reason_without_torch())
)

SEEDS = pytest.mark.parametrize("seed", ["0", "2"])


def test_the_device_is_what_was_asked_for() -> None:
    torch_program(
        """
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 2
        assert torch.cuda.mem_get_info(1) == (64 * MIB, 64 * MIB)
        properties = torch.cuda.get_device_properties(0)
        assert (properties.major, properties.total_memory) == (8, 64 * MIB)
        x = torch.empty(MIB, device="cuda:1")
        assert torch.cuda.memory_allocated(1) == 4 * MIB
        assert torch.cuda.memory_allocated(0) == 0
        """,
        SOFTCUDA_DEVICES="2",
        SOFTCUDA_BYTES=str(64 << 20),
    )


@SEEDS
def test_bytes_survive_copies_in_every_direction(seed: str) -> None:
    torch_program(
        """
        x = pattern(MIB)
        y = x.cuda()
        assert torch.equal(y.cpu(), x)
        assert torch.equal(y.clone().cpu(), x)
        z = torch.empty_like(y)
        z.copy_(y)
        assert torch.equal(z.to("cuda:1").cpu(), x)
        assert torch.equal(y[5:100].cpu(), x[5:100])
        """,
        SOFTCUDA_SEED=seed,
        SOFTCUDA_DEVICES="2",
    )


@SEEDS
def test_fills_are_computed(seed: str) -> None:
    torch_program(
        """
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            assert torch.equal(torch.ones(1001, device="cuda", dtype=dtype).cpu(),
                               torch.ones(1001, dtype=dtype)), dtype
        x = torch.full((1000,), 3.5, device="cuda")
        x[100:200].fill_(-1)
        expected = torch.full((1000,), 3.5)
        expected[100:200] = -1
        assert torch.equal(x.cpu(), expected)
        assert torch.equal(x.zero_().cpu(), torch.zeros(1000))
        """,
        SOFTCUDA_SEED=seed,
    )


@SEEDS
def test_pinned_copies_on_streams_with_events(seed: str) -> None:
    torch_program(
        """
        a, b = torch.cuda.Stream(), torch.cuda.Stream()
        for start in range(20):
            host = pattern(MIB // 4, start).pin_memory()
            assert host.is_pinned()
            back = torch.empty_like(host, pin_memory=True)
            with torch.cuda.stream(a):
                device = host.to("cuda", non_blocking=True)
                sent = torch.cuda.Event(enable_timing=True)
                sent.record()
            b.wait_event(sent)
            device.record_stream(b)
            with torch.cuda.stream(b):
                back.copy_(device, non_blocking=True)
                done = torch.cuda.Event(enable_timing=True)
                done.record()
            del device
            done.synchronize()
            assert done.query()
            assert sent.elapsed_time(done) >= 0
            assert torch.equal(back, host)
        """,
        SOFTCUDA_SEED=seed,
    )


def test_a_forgotten_wait_corrupts_under_a_seed() -> None:
    out, _ = torch_program(
        """
        a, wrong = torch.cuda.Stream(), 0
        for start in range(40):
            host = pattern(MIB // 4, start + 1).pin_memory()
            with torch.cuda.stream(a):
                device = host.to("cuda", non_blocking=True)
            other = torch.empty_like(device)
            other.copy_(device)  # on the default stream, which does not wait for a
            wrong += not torch.equal(other.cpu(), host)
            torch.cuda.synchronize()
        assert soft.races()
        print(wrong)
        """,
        SOFTCUDA_SEED="11",
    )
    assert int(out) > 5


@SEEDS
def test_record_stream_keeps_a_block_until_its_last_use(seed: str) -> None:
    code = """
        a, wrong = torch.cuda.Stream(), 0
        back = torch.empty(MIB // 4, dtype=torch.int32, pin_memory=True)
        for start in range(40):
            x = pattern(MIB // 4, start + 1)
            device = x.cuda()
            a.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(a):
                back.copy_(device, non_blocking=True)
            if RECORD:
                device.record_stream(a)
            del device
            torch.full((MIB // 4,), -1, dtype=torch.int32, device="cuda")
            torch.cuda.current_stream().synchronize()
            a.synchronize()
            wrong += not torch.equal(back, x)
        assert bool(soft.races()) != RECORD
        print(wrong)
        """
    out, _ = torch_program(code.replace("RECORD", "True"), SOFTCUDA_SEED=seed)
    assert int(out) == 0
    if seed != "0":
        out, _ = torch_program(code.replace("RECORD", "False"), SOFTCUDA_SEED=seed)
        assert int(out) > 0


@SEEDS
def test_graphs(seed: str) -> None:
    torch_program(
        """
        warnings.simplefilter("ignore")
        empty = torch.cuda.CUDAGraph()
        with torch.cuda.graph(empty):
            pass
        empty.replay()
        static = torch.zeros(8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static.fill_(7)
            inside = torch.full((4,), 2.0, device="cuda")
        assert static.cpu().tolist() == [0.0] * 8
        graph.replay()
        assert static.cpu().tolist() == [7.0] * 8
        assert inside.cpu().tolist() == [2.0] * 4
        """,
        SOFTCUDA_SEED=seed,
    )


def test_a_synchronisation_in_a_capture_is_an_error() -> None:
    torch_program(
        """
        warnings.simplefilter("ignore")
        x = torch.zeros(8, device="cuda")
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.cuda.synchronize()
        except RuntimeError as error:
            assert "capture" in str(error), error
        else:
            raise AssertionError("no error")
        """
    )


def test_out_of_memory_is_torchs_own_error_and_one_failure_is_retried() -> None:
    torch_program(
        """
        try:
            torch.empty(1 << 30, device="cuda")
        except torch.OutOfMemoryError as error:
            assert "256.00 MiB" in str(error), error
        else:
            raise AssertionError("no error")
        soft.inject("cudaMalloc", 1, 2)
        x = torch.empty(30 * MIB, device="cuda")
        assert soft.calls("cudaMalloc") >= 2
        """
    )


def test_a_failed_launch_reaches_the_program() -> None:
    torch_program(
        """
        x = torch.zeros(8, device="cuda")
        soft.inject("cudaLaunchKernel", 1, 700)
        try:
            x.add_(1)
            torch.cuda.synchronize()
        except torch.AcceleratorError as error:
            assert "illegal memory access" in str(error), error
        else:
            raise AssertionError("no error")
        """
    )


@SEEDS
def test_a_training_loop_with_convolutions_runs(seed: str) -> None:
    torch_program(
        """
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.Linear(8 * 36, 10)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(
                model(torch.zeros(4, 3, 8, 8, device="cuda")),
                torch.zeros(4, dtype=torch.int64, device="cuda"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() > 0
        """,
        SOFTCUDA_SEED=seed,
    )


def test_forked_data_loader_workers() -> None:
    torch_program(
        """
        device = torch.ones(8, device="cuda")
        loader = torch.utils.data.DataLoader(range(32), batch_size=4, num_workers=2,
                                             pin_memory=True, multiprocessing_context="fork")
        seen = sorted(int(v) for batch in loader for v in batch.cuda(non_blocking=True).cpu())
        assert seen == list(range(32))
        """
    )


ALLOCATOR = """
#include <cstddef>
extern "C" {
int cuMemAllocManaged(unsigned long long*, std::size_t, unsigned);
int cuMemFree_v2(unsigned long long);
int allocations = 0, releases = 0;
void* tiny_alloc(std::size_t bytes, int, void*) {
  unsigned long long ptr = 0;
  if (cuMemAllocManaged(&ptr, bytes, 1) != 0) return nullptr;
  ++allocations;
  return reinterpret_cast<void*>(ptr);
}
void tiny_free(void* ptr, std::size_t, int, void*) {
  if (cuMemFree_v2(reinterpret_cast<unsigned long long>(ptr)) == 0) ++releases;
}
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@SEEDS
def test_a_pluggable_allocator_of_managed_memory_oversubscribes(tmp_path: Path, seed: str) -> None:
    source, library = tmp_path / "tiny.cpp", tmp_path / "libtiny.so"
    source.write_text(ALLOCATOR)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    torch_program(
        f"""
        memory = torch.cuda.memory
        library = {str(library)!r}
        memory.change_current_allocator(
            memory.CUDAPluggableAllocator(library, "tiny_alloc", "tiny_free"))
        x = pattern(2 * MIB)
        tensors = [(x + i).cuda() for i in range(10)]
        assert torch.cuda.mem_get_info()[0] == 0
        assert all(torch.equal(t.cpu(), x + i) for i, t in enumerate(tensors))
        del tensors
        count = lambda name: ctypes.c_int.in_dll(ctypes.CDLL(library), name).value
        assert count("allocations") >= 10
        assert count("allocations") == count("releases")
        assert torch.cuda.mem_get_info()[0] == 32 * MIB
        """,
        SOFTCUDA_SEED=seed,
        SOFTCUDA_BYTES=str(32 << 20),
    )
