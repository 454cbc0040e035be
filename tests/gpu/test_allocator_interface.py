"""Functions of a CUDA allocator that torch calls, and no Python function reaches."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from support.gpu import needs_torch  # noqa: E402

from umem.integrations.torch import build  # noqa: E402

HERE = Path(__file__).resolve().parent
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]
Program = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The start of a program: `calls`, the functions of allocator_calls.cpp."""
    if (problem := build.cuda_problem()) is not None:
        pytest.skip(problem)
    library = tmp_path_factory.mktemp("calls") / "calls.so"
    flags = build.compile_flags(HERE.parents[1] / "src", True)
    torch_lib = Path(torch.__file__).parent / "lib"
    subprocess.run(
        ["c++", *flags, "-shared", str(HERE / "allocator_calls.cpp"), "-o", str(library),
         f"-L{torch_lib}", "-lc10", "-lc10_cuda"],
        check=True,
    )  # fmt: skip
    return f"""
    calls = ctypes.CDLL({str(library)!r})
    for name in ("has_context", "allocates_at"):
        if hasattr(calls, name):
            getattr(calls, name).restype = ctypes.c_bool
    address = lambda tensor: ctypes.c_void_p(tensor.data_ptr())
    """


@needs_torch("2.12")
def test_the_context_of_a_pointer(program: Program, calls: str) -> None:
    program(
        calls
        + """
    enable()
    before = blocks(1)[0]
    torch.cuda.memory._record_memory_history(stacks="python")
    x = blocks(1)[0]
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        inside = blocks(1)[0]
    assert [calls.has_context(address(t)) for t in (before, x, inside)] == [False, True, True]
    """
    )


@needs_torch("2.12")
def test_observers_are_told_of_requests_that_torch_rejects_in_a_pool(
    program: Program, calls: str
) -> None:
    program(
        calls
        + """
    enable()
    torch.cuda.init()  # observers are of the devices that there are
    calls.count_rejections()
    total = torch.cuda.mem_get_info()[1]
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        try:
            torch.empty(total + MIB, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("it was given")
    deadline = time.monotonic() + 30  # torch tells them from a thread of their own
    while calls.rejections() == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert calls.rejections() == 1, calls.rejections()
    """,
        fresh=True,
        PYTORCH_CUDA_ALLOC_CONF="throw_on_cudamalloc_oom:True",
    )


@needs_torch("2.13")
def test_a_block_at_an_address_that_a_pool_has_cached(program: Program, calls: str) -> None:
    program(
        calls
        + """
    enable()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = blocks(1)[0]
        where = address(x)
        del x
        assert calls.allocates_at(ctypes.c_size_t(2 * MIB), where)
        assert calls.allocates_at(ctypes.c_size_t(2 * MIB), where)  # it was freed
    """
    )


def test_a_tracker_of_segments_hears_of_no_managed_one(program: Program, calls: str) -> None:
    # NCCL's process group would register it, which fails.
    program(
        calls
        + """
    enable()
    torch.cuda.init()
    calls.track()
    x = blocks(1)[0]
    assert (calls.tracked_blocks(), calls.tracked_segments()) == (1, 0)
    del x
    torch.cuda.empty_cache()
    assert calls.tracked_segments() == 0
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        y = blocks(1)[0]
    assert calls.tracked_segments() == 1
    """
    )


def test_an_allocator_that_another_library_registered_stays(program: Program, calls: str) -> None:
    program(
        calls
        + """
    calls.register_another()
    try:
        enable(allocator="subclass")
    except umem.errors.StateError as error:
        assert "another allocator was set for CUDA" in str(error), error
    else:
        raise AssertionError("it was replaced")
    """
    )
