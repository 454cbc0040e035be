"""Random programs of umem's public functions on CUDA tensors, whose work is done late."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("softcuda")]
WORKER = Path(__file__).with_name("state_machine_worker.py")


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_no_byte_is_lost_whatever_is_called(seed: int, nightly: bool) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SOFTCUDA_", "UMEM_"))}
    environ |= {"SOFTCUDA_LIB": os.environ["SOFTCUDA_LIB"], "SOFTCUDA_BYTES": str(1 << 30)}
    command = [sys.executable, str(WORKER), "--seed", str(seed)]
    command += ["--examples", "500" if nightly else "50"]
    done = subprocess.run(
        command,
        capture_output=True, text=True, check=False, timeout=3600 if nightly else 600, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "equal bytes, 0 races" in done.stdout
