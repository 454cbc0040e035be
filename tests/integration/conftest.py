"""Every integration test starts without umem, on one thread, and leaves it so."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import umem  # noqa: E402

_left = 0  # bytes alive after the last test


@pytest.hookimpl(wrapper=True, tryfirst=True)  # so it ends after all others, which hold log records
def pytest_runtest_teardown(item: pytest.Function) -> Iterator[None]:
    """Report a test that leaves tensors alive, which would fix the device options of the next."""
    global _left
    try:
        return (yield)
    finally:
        item.funcargs.clear()  # pytest would hold them for longer
        # A collection visits every object that torch has imported.
        if umem.stats().live_bytes > _left:
            gc.collect()
        before, _left = _left, umem.stats().live_bytes
        assert _left <= before, f"the test left {_left - before} bytes alive"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Also for what a module's tests compare with: another number of threads has other bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    umem.disable()


@pytest.fixture
def on() -> object:
    """umem with a small budget that evicts by age."""
    return umem.enable(budget="32MiB", device="soft", policy="lru", observer="native")
