"""Random programs of umem's public functions on CPU tensors, with a shadow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from support.api_machine import ApiMachine


class OnTheSoftwareDevice(ApiMachine):
    device = "soft"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Half of the time would be spent on collections, and on reading this project's own file."""
    monkeypatch.chdir(tmp_path)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_no_byte_is_lost_whatever_is_called(nightly: bool) -> None:
    """5,000 operations at most, always the same; every night 200,000 others."""
    chosen = settings(
        max_examples=4_000 if nightly else 50, stateful_step_count=50, derandomize=not nightly,
        database=None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(OnTheSoftwareDevice, settings=chosen)
