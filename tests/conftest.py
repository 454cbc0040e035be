"""Every test has exactly one of the markers cpu and gpu; cpu is given where none is."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        gpu, cpu = (item.get_closest_marker(name) for name in ("gpu", "cpu"))
        if gpu and cpu:
            raise pytest.UsageError(f"{item.nodeid} is marked both cpu and gpu")
        if gpu is None and cpu is None:
            item.add_marker(pytest.mark.cpu)
        if gpu is not None and (reason := _why_no_gpu()) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@functools.cache  # and not before a test needs it: a started driver does not survive a fork
def _why_no_gpu() -> str | None:
    # The software driver (tests/softcuda) counts as a GPU, and is not started to find out.
    if folder := os.environ.get("SOFTCUDA_LIB"):
        there = (Path(folder) / "libcuda.so.1").is_file()
        return None if there else f"there is no libcuda.so.1 in SOFTCUDA_LIB={folder}"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1) on this machine, and SOFTCUDA_LIB is not set"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return "the NVIDIA driver does not start"
    return None if count.value else "no CUDA device"


@pytest.fixture(autouse=True)
def _no_options_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever runs the tests decides nothing in them."""
    for name in [name for name in os.environ if name.split("_")[0] == "UMEM"]:
        monkeypatch.delenv(name)
