"""Every integration test starts without umem, on one thread, and leaves it so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import umem  # noqa: E402


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    umem.disable()
    torch.set_num_threads(threads)
