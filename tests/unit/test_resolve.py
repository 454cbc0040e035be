"""Options that are valid alone and refused together, or on this machine, by the option's name."""

from __future__ import annotations

from pathlib import Path

import pytest

import umem
from umem.base import host
from umem.base.native import core
from umem.config import settings
from umem.errors import ConfigError, NotSupportedError
from umem.session import resolve

REFUSED = {
    "a policy that there is not": ("soft", {"policy": "lrv"}, "policy=: .*'lrv'.*lru"),
    "a profile that there is not": ("soft", {"device": "soft:a101"}, "device=.*a100"),
    "mapped memory without a GPU": ("soft", {"backing": "mapped"}, "backing=: .*managed"),
    "mapped memory in a pool": (
        "cuda", {"backing": "mapped", "allocator": "pool"}, "backing=: .*another allocator",
    ),
    "a smaller GPU under the guard": (
        "cuda", {"device": "cuda:8GiB", "guard": "on"}, "device=: .*guard=off",
    ),
    "a limit without a disk": ("soft", {"disk_writes": "1GB/day"}, "disk_writes=.*a disk"),
    "a GPU's budget below the floor": ("cuda", {"budget": "2MiB"}, "budget=: .*floor"),
    "a budget above the GPU's size": (
        "cuda", {"device": "cuda:8GiB", "budget": "16GiB"}, "budget=: 16 GiB is more than",
    ),
    "recomputation without torch": (
        "cuda", {"allocator": "none", "recompute": "auto"}, "recompute=: .*allocator=none",
    ),
    "updates on the host without torch": (
        "cuda", {"allocator": "none", "optimizer": "host"}, "optimizer=: .*allocator=none",
    ),
}  # fmt: skip


def options(monkeypatch: pytest.MonkeyPatch, kind: str, given: dict[str, str]) -> None:
    monkeypatch.setattr(resolve, "device_kind", lambda _: kind)
    resolve.native_options(settings.load(given, environ={}), threads=1)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_its_option(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    kind, given, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        options(monkeypatch, kind, given)


def test_a_restart_counts_the_memory_that_live_tensors_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def available() -> int:
        figures = core.stats() if core.opened_devices() else {}
        held = ("resident_bytes", "host_bytes")
        return (256 << 20) - sum(figures.get(name, 0) for name in held)

    monkeypatch.setattr(host, "available_memory", available)
    found = []
    kept: list[int] = []
    for _ in range(3):
        with umem.enable(budget="64MiB", device="soft", allocator="none"):
            found.append(umem.stats().host_budget_bytes)
            kept.append(core.allocate(48 << 20))
    for ptr in kept:
        core.release(ptr)
    assert len(set(found)) == 1


def test_a_folder_that_cannot_hold_files_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    options(monkeypatch, "cuda", {"disk": str(tmp_path)})
    with pytest.raises(ConfigError, match="Not a directory; allowed: a folder on a disk"):
        options(monkeypatch, "cuda", {"disk": str(file)})


def test_a_gpu_that_is_not_there_is_refused_and_not_asked_for_by_auto(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resolve, "why_no_gpu", lambda: "the driver is gone")
    with pytest.raises(NotSupportedError, match="device=: the driver is gone; allowed here"):
        resolve.device_kind(settings.load({"device": "cuda"}, environ={}))
    assert resolve.device_kind(settings.load({}, environ={})) == "soft"
    monkeypatch.setattr(resolve, "why_no_gpu", lambda: "")
    assert resolve.device_kind(settings.load({}, environ={})) == "cuda"
    assert resolve.device_kind(settings.load({"device": "soft"}, environ={})) == "soft"
