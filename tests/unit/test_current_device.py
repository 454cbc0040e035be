"""Whether the device moves bytes beside compute decides what a plan costs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from umem.base import current_device


@pytest.mark.parametrize(
    ("device", "integrated", "hides"),
    [
        ("soft", [False], False),
        ("cuda", [False], True),
        ("cuda", [True], False),
        ("cuda", [], True),
    ],
)
def test_an_integrated_gpu_moves_bytes_through_the_memory_that_compute_uses(
    device: str, integrated: list[bool], hides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = SimpleNamespace(
        current_options=lambda: SimpleNamespace(device=device),
        probe_cuda=lambda: {"devices": [{"integrated": each} for each in integrated]},
    )
    monkeypatch.setattr(current_device, "core", core)
    assert current_device.hides_transfers() is hides
