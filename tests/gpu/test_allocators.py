"""The three CUDA allocators: which one is chosen, what each can do, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
Program = Callable[..., tuple[str, str]]

BASICS = """
    assert core.owns(blocks(1)[0].data_ptr())
    tensors = blocks(24)  # 48 MiB in 32
    assert intact(tensors) and umem.stats().evictions > 0
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        copy = tensors[0].clone()
    copy.record_stream(torch.cuda.current_stream())
    del copy
    assert torch.empty(0, device="cuda").data_ptr() == 0
    assert intact(tensors)
    del tensors
    torch.cuda.synchronize()
    gc.collect()
    assert umem.stats().live_bytes == 0, umem.stats().live_bytes
"""
CORE = "    from umem.base.native import core\n"


def test_auto_is_the_subclass_and_says_so(program: Program) -> None:
    out, _ = program(
        CORE
        + """
    enable()
    assert torch.cuda.get_allocator_backend() == "umem"
    assert "subclass" in umem.summary()
    """
        + BASICS
    )
    assert out == ""


@pytest.mark.parametrize("allocator", ["auto", "pluggable"])
def test_torchs_setting_for_another_allocator_is_refused(program: Program, allocator: str) -> None:
    """Else torch fails at its first use of CUDA, or speaks of a bug in PyTorch."""
    program(
        f"""
    try:
        enable(allocator={allocator!r})
    except umem.errors.StateError as error:
        assert "backend:cudaMallocAsync" in str(error) and "remove" in str(error), error
    else:
        raise AssertionError("umem is on")
    assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    """,
        fresh=True,
        PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync",
    )


def test_pluggable_needs_no_extension(program: Program) -> None:
    program(
        CORE
        + """
    from umem.integrations.torch import build as torch_build
    def cannot(*args, **kwargs):
        raise umem.errors.NotSupportedError("there is no C++ compiler")
    torch_build.load = cannot
    try:
        enable(backing="mapped")  # whose operators' streams only the extension's observer knows
        raise AssertionError("operators would use memory that moves")
    except umem.errors.NotSupportedError as error:
        assert "no C++ compiler" in str(error)
    session = enable()
    assert session.attached.kind == "pluggable", session.attached
    assert "no C++ compiler" in umem.summary()
    """
        + BASICS
    )


def test_pluggable(program: Program) -> None:
    program(
        CORE
        + """
    session = enable(allocator="pluggable")
    assert torch.cuda.get_allocator_backend() == "pluggable"
    assert session.attached.kind == "pluggable" and session.pool is None
    """
        + BASICS
        + """
    x = torch.empty(MIB, device="cuda")
    del x
    assert umem.stats().cached_bytes > 0
    torch.cuda.empty_cache()
    assert umem.stats().cached_bytes == 0
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(16 * MIB / total)
    assert umem.stats().budget_bytes <= 16 * MIB
    """
    )


def test_pluggable_says_why_memory_is_refused(program: Program) -> None:
    program(
        """
        enable("16MiB", host_budget="16MiB", allocator="pluggable")
        try:
            torch.empty(MIB << 20, dtype=torch.uint8, device="cuda")
        except RuntimeError as error:
            # As accelerate and Lightning search for it.
            assert len(error.args) == 1
            assert str(error).startswith("CUDA out of memory. Tried to allocate 1024.00 GiB. umem ")
            assert "umem out of memory: asked for 1024.00 GiB" in str(error), error
        else:
            raise AssertionError("it was given")
        x = torch.full((4,), 2.0, device="cuda")
        assert x.cpu().tolist() == [2.0] * 4
        """
    )


def test_pluggable_refuses_graphs_and_names_the_subclass(program: Program) -> None:
    program(
        """
        enable(allocator="pluggable")
        x = torch.full((MIB,), 1.0, device="cuda")
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                x.clone()
        except RuntimeError as error:
            assert "UMEM_ALLOCATOR=subclass" in str(error), error
        else:
            raise AssertionError("it was captured")
        """
    )


def test_pluggable_off_is_plain_memory_and_on_again(program: Program) -> None:
    program(
        CORE
        + """
    enable(allocator="pluggable")
    before = blocks(4)
    umem.disable()
    plain = blocks(4)
    assert not core.owns(plain[0].data_ptr())
    assert intact(before) and intact(plain)
    enable(allocator="auto")
    assert torch.cuda.get_allocator_backend() == "pluggable"
    again = blocks(4)
    assert core.owns(again[0].data_ptr())
    del plain, before
    assert intact(again)
    umem.disable()
    try:
        enable(allocator="subclass")
    except umem.errors.StateError as error:
        assert "pluggable" in str(error) and "new process" in str(error), error
    else:
        raise AssertionError("torch cannot change it")
    """
    )


@pytest.mark.parametrize(
    "start",
    [
        pytest.param("torch.cuda.init()", id="init"),
        pytest.param("torch.cuda.mem_get_info()", id="mem_get_info"),
        pytest.param("torch.empty(1, device='cuda')", id="tensor"),
    ],
)
@pytest.mark.parametrize("allocator", ["auto", "subclass", "pluggable"])
def test_too_late_is_refused_and_pool_is_named(
    program: Program, start: str, allocator: str
) -> None:
    program(
        f"""
        {start}
        try:
            enable(allocator={allocator!r})
        except umem.errors.StateError as error:
            assert "CUDA is already initialised" in str(error), error
            assert "UMEM_ALLOCATOR=pool" in str(error), error
        else:
            raise AssertionError("it was too late")
        assert not umem.is_enabled()
        assert torch.cuda.get_allocator_backend() == "native"
        assert torch.full((4,), 1.0, device="cuda").cpu().tolist() == [1.0] * 4
        """
    )


def test_pool_serves_its_block_after_cuda_was_initialised(program: Program) -> None:
    program(
        CORE
        + """
    before = torch.full((MIB,), 5.0, device="cuda")
    session = enable(allocator="pool")
    outside = torch.full((MIB,), 6.0, device="cuda")
    assert not core.owns(outside.data_ptr())
    with session:
        tensors = [torch.full((3 * MIB,), float(i), device="cuda") for i in range(4)]  # 48 MiB
        assert all(core.owns(t.data_ptr()) for t in tensors)
    assert not umem.is_enabled()
    assert intact(tensors) and bool(before.cpu().eq(5.0).all())
    del tensors, session
    gc.collect()
    torch.cuda.empty_cache()
    assert umem.stats().live_bytes == 0, umem.stats().live_bytes
    """
    )


def test_pool_by_hand(program: Program) -> None:
    program(
        CORE
        + """
    session = enable(allocator="pool")
    with torch.cuda.use_mem_pool(session.pool):
        x = torch.full((MIB,), 1.0, device="cuda")
    assert core.owns(x.data_ptr())
    assert x.cpu().eq(1.0).all()
    assert torch.cuda.memory_allocated() >= 4 * MIB  # torch's own statistics go on
    """
    )


def test_the_subclass_comes_back_and_tensors_outlive_it(program: Program) -> None:
    program(
        CORE
        + """
    kept = []
    for i in range(3):
        enable(policy=["lru", "none", "lru"][i])
        kept.append(torch.full((MIB,), float(2 * i), device="cuda"))
        assert core.owns(kept[-1].data_ptr())
        umem.disable()
        assert torch.cuda.get_allocator_backend() == "native"
        kept.append(torch.full((MIB,), float(2 * i + 1), device="cuda"))
        assert not core.owns(kept[-1].data_ptr())
    assert intact(kept)
    kept[0].resize_(4 * MIB)  # its storage remembers umem, which is off
    assert not core.owns(kept[0].data_ptr())
    assert bool(kept[0][:MIB].cpu().eq(0.0).all())
    del kept
    assert umem.stats().live_bytes == 0
    """
    )


def test_without_cuda_headers_auto_is_pluggable_and_says_why(program: Program) -> None:
    program(
        """
        from umem.integrations.torch import build as torch_build
        from umem.integrations.torch import observer as torch_observer
        class Extension:
            with_cuda = False
            def __getattr__(self, name):
                return lambda *args: "other"
        torch_build.load = lambda *args, **kwargs: Extension()
        torch_build.cuda_problem = lambda: "the headers of CUDA 13 are missing"
        try:
            enable(allocator="subclass")
        except umem.errors.NotSupportedError as error:
            assert "the headers of CUDA 13 are missing" in str(error), error
        else:
            raise AssertionError("there is none")
        session = enable(observer="off")
        assert session.attached.kind == "pluggable"
        assert "the headers of CUDA 13 are missing" in umem.summary()
        """
    )


def test_two_devices_have_a_budget_each(program: Program) -> None:
    import torch

    if torch.cuda.device_count() < 2 and not _on_softcuda():
        pytest.skip("needs two GPUs")
    program(
        CORE
        + """
    enable()
    tensors = {d: [torch.full((MIB,), float(i), device=f"cuda:{d}") for i in range(12)]
               for d in (0, 1)}  # 48 MiB on each, of 32
    assert all(core.owns(t.data_ptr()) for ts in tensors.values() for t in ts)
    assert [torch.cuda.memory_allocated(d) for d in (0, 1)] == [48 * MIB, 48 * MIB]
    assert [t.device.index for t in (tensors[0][0], tensors[1][0])] == [0, 1]
    assert all(intact(ts) for ts in tensors.values())
    there = tensors[0][3].to("cuda:1")
    assert torch.cuda.memory_allocated(1) == 52 * MIB
    assert bool(there.cpu().eq(3.0).all())
    devices = {s["device"] for s in torch.cuda.memory_snapshot()}
    assert devices == {0, 1}, devices
    with torch.cuda.device(1):
        assert torch.empty(1, device="cuda").device.index == 1
    del tensors, there
    torch.cuda.empty_cache()
    assert [torch.cuda.memory_reserved(d) for d in (0, 1)] == [0, 0]
    """,
        SOFTCUDA_DEVICES="2",
    )


def _on_softcuda() -> bool:
    import os

    return bool(os.environ.get("SOFTCUDA_LIB"))
