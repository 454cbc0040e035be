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


@pytest.mark.parametrize("option", ["optimizer", "recompute"])
def test_options_for_torch_are_refused(option: str) -> None:
    with pytest.raises(umem.ConfigError, match=rf"call umem\.enable\({option}=\.\.\.\) first"):
        umem.cupy.enable(**{option: "auto"})
    assert not umem.is_enabled()
