"""Every integration test starts without umem, on one thread, and leaves it so."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import umem  # noqa: E402


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    # Here, because pytest holds a test's fixtures until after their teardown. A collection visits
    # every object that torch has imported, so it runs only if something is alive.
    if umem.stats().live_bytes:
        gc.collect()
    left = umem.stats().live_bytes
    assert left == 0, f"an earlier test left {left} bytes alive, which bind the device's options"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    umem.disable()
    torch.set_num_threads(threads)


@pytest.fixture
def on() -> object:
    """umem with a small budget that evicts by age."""
    return umem.enable(budget="32MiB", device="soft", policy="lru", observer="native")
