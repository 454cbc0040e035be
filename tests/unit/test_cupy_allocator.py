"""CuPy's allocator while umem's is installed and removed, with a stand-in for CuPy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import umem
from umem.integrations import cupy
from umem.integrations.blocks import EXTERNAL


def test_an_allocator_that_was_removed_leaves_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    before = object()
    allocators: list[object] = [before]
    cuda = SimpleNamespace(
        get_allocator=lambda: allocators[-1], set_allocator=lambda new: allocators.append(new)
    )
    monkeypatch.setattr(cupy, "require_cuda", lambda _: None)
    monkeypatch.setattr(cupy, "_cupy", lambda: SimpleNamespace(cuda=cuda))
    for _ in range(2):
        cupy.install()
        assert EXTERNAL
        assert allocators[-1] is cupy.malloc
        cupy.remove()
        assert not EXTERNAL
        assert allocators[-1] is before
    cupy.install()
    EXTERNAL.remove()  # as umem.disable() does
    cupy.remove()
    assert not EXTERNAL
    assert allocators[-1] is before


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_updates_of_torchs_optimizers_are_refused(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "environment":
        monkeypatch.setenv("UMEM_OPTIMIZER", "host")
    with pytest.raises(umem.ConfigError, match="turns umem on without torch"):
        umem.cupy.enable(**({"optimizer": "host"} if by == "argument" else {}))
    assert not umem.is_enabled()
