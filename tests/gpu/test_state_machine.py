"""Random programs of umem's public functions on CUDA tensors, whose work is done late."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gpu import worker

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("softcuda")]
WORKER = Path(__file__).with_name("state_machine_worker.py")


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3, 4))]
)
def test_no_byte_is_lost_whatever_is_called(seed: int, nightly: bool) -> None:
    examples, timeout = ("500", 3600) if nightly else ("50", 600)
    out = worker(WORKER, "--seed", str(seed), "--examples", examples, timeout=timeout)
    assert "equal bytes, 0 races" in out
