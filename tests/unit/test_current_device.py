"""A plan's cost depends on the device's ability to overlap transfers with compute."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from umem.base import current_device


@pytest.mark.parametrize(
    ("device", "disk", "integrated", "hides"),
    [
        ("soft", "", [False], False),
        ("soft", "/fast", [False], True),
        ("cuda", "", [False], True),
        ("cuda", "", [True], False),
        ("cuda", "", [], True),
    ],
)
def test_an_integrated_gpu_moves_bytes_through_the_memory_that_compute_uses(
    device: str, disk: str, integrated: list[bool], hides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = SimpleNamespace(
        current_options=lambda: SimpleNamespace(device=device, disk=disk),
        probe_cuda=lambda: {"devices": [{"integrated": each} for each in integrated]},
    )
    monkeypatch.setattr(current_device, "core", core)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert current_device.hides_transfers() is hides


@pytest.mark.parametrize("integrated", [False, True])
def test_torch_is_asked_where_it_uses_the_gpu(
    integrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not through the driver, which would be initialized again."""
    options = SimpleNamespace(device="cuda")
    core = SimpleNamespace(current_options=lambda: options)
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 0,
        get_device_properties=lambda _: SimpleNamespace(is_integrated=int(integrated)),
    )
    monkeypatch.setattr(current_device, "core", core)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert current_device.hides_transfers() is not integrated


@pytest.mark.parametrize(
    ("gpu", "profile"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-pcie4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-pcie4"),
        ("NVIDIA H200", "h200-pcie5"),
        ("an unknown one", current_device._GPU_DEFAULT),
    ],
)
def test_a_gpu_has_the_profile_of_its_model(gpu: str, profile: str) -> None:
    assert current_device._nearest_profile(gpu) == profile


def test_without_torch_the_driver_names_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [{"name": "one"}, {"name": "two"}]
    core = SimpleNamespace(probe_cuda=lambda: {"devices": devices})
    monkeypatch.setattr(current_device, "core", core)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert current_device._current_gpu() == 0
    assert [current_device.gpu_name(number) for number in (None, 0, 1)] == ["one", "one", "two"]
    devices.clear()
    assert current_device.gpu_name() == "cuda"
