"""The drivers that the contract suite runs over, and the program that plans are for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import _core_testing
import pytest
from support.driver import FRAMES, PAGE, SUCCESS, Driver
from support.planned import Program, options, running


@pytest.fixture(params=["memory", "disk"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    """The software device with 16 frames, closed with nothing left allocated."""
    calls = _core_testing
    disk = str(tmp_path) if request.param == "disk" else ""
    calls.open_soft(FRAMES * PAGE, "a100-pcie4", disk=disk, staging_bytes=3 * PAGE)
    live: list[int] = []
    result, stream = calls.cuStreamCreate(1)
    assert result == SUCCESS
    opened = Driver(calls, stream)
    plain_alloc = opened.alloc

    def alloc(pages: int) -> int:
        live.append(plain_alloc(pages))
        return live[-1]

    opened.alloc = alloc  # type: ignore[method-assign]
    try:
        yield opened
    finally:
        for ptr in live:
            calls.cuMemFree(ptr)
        calls.close()


@pytest.fixture
def program() -> Iterator[Program]:
    """With 16 MiB, under the policy `planned`."""
    with running(options()) as made:
        yield made
