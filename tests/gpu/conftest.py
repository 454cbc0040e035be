"""Tests of umem under the CUDA build of torch: on a GPU, or on the software driver.

With SOFTCUDA_LIB set the software driver is loaded here, before any test module imports torch.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from softcuda import load
from support.gpu import program as run_program


def _why_no_cuda_torch() -> str | None:
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return "torch is not installed"
    (folder,) = spec.submodule_search_locations or [""]
    there = (Path(folder) / "lib" / "libtorch_cuda.so").is_file()
    return None if there else "this torch is not a CUDA build"


NO_CUDA_TORCH = _why_no_cuda_torch()
SOFT = load.load() if NO_CUDA_TORCH is None and os.environ.get(load.LIBRARY_VARIABLE) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if NO_CUDA_TORCH is None:
        return
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason=NO_CUDA_TORCH))


@pytest.fixture(autouse=True)
def _no_cached_pools() -> Iterator[None]:
    """Private pools cached by torch's own allocator count towards the next test's budget."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def soft() -> Iterator[load.Softcuda | None]:
    """The software driver's controls, back to normal afterwards; None on a real GPU."""
    yield SOFT
    if SOFT is not None:
        SOFT.reset()
        SOFT.seed(0)


@pytest.fixture
def softcuda(soft: load.Softcuda | None) -> load.Softcuda:
    """Like `soft`, for tests that make no sense on a real GPU."""
    if soft is None:
        pytest.skip("needs the software driver: set SOFTCUDA_LIB")
    return soft


@pytest.fixture
def umem_on() -> Iterator[object]:
    """umem with a budget of 64 MiB; a test that leaves memory alive fails."""
    import umem

    gc.collect()
    session = umem.enable(budget="64MiB", device="cuda")
    try:
        yield session
    finally:
        gc.collect()
        left = umem.stats().live_bytes
        umem.disable()
    assert left == 0, f"the test left {left} bytes alive"


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    yield
    if NO_CUDA_TORCH is None:
        import torch

        import umem

        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # memory cached by pools would count towards later budgets
        umem.disable()
    races = [] if SOFT is None else SOFT.races()
    assert not races, "the test left accesses that nothing orders: " + "; ".join(races)


@pytest.fixture
def program() -> Callable[..., tuple[str, str]]:
    """Runs code in a fresh process: `support.gpu.program`."""
    return run_program
