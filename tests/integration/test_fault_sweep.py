"""Every driver call of a training step fails once, on the software device: nothing may be lost.

The same on the software driver, and errors that the sweep must notice:
tests/gpu/test_fault_sweep.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SWEEP = Path(__file__).resolve().parents[1] / "gpu" / "sweep.py"


def sweep(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SWEEP), "--device", "soft", "--timeout", "120", *arguments],
        capture_output=True, text=True, check=False, timeout=900, env=os.environ | environ,
    )  # fmt: skip


@pytest.mark.parametrize("on_disk", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_no_failure_of_a_driver_call_loses_anything(on_disk: bool, tmp_path: Path) -> None:
    done = sweep("--per-entry", "2", **({"UMEM_DISK": str(tmp_path)} if on_disk else {}))
    assert done.stdout.endswith("lost 0, races 0\n"), done.stdout + done.stderr
    assert done.returncode == 0
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line}
    header = done.stdout.splitlines()[0].split()[2:]
    assert int(rows["cuMemFree"][1 + header.index("raised")]) > 0


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        pytest.param("overwrite", "weight 1: values", marks=pytest.mark.nightly),
        pytest.param("number", "parameter 0: wrong numbers", marks=pytest.mark.nightly),
        pytest.param("leak", "stay alive", marks=pytest.mark.nightly),
    ],
)
def test_a_planted_loss_is_noticed(plant: str, words: str) -> None:
    done = sweep("--entry", "cuMemFree", "--per-entry", "2", "--plant", plant)
    lost = [line for line in done.stdout.splitlines() if line.startswith("lost: cuMemFree")]
    assert lost, done.stdout + done.stderr
    assert all(words in line for line in lost)
    assert done.returncode == 1
