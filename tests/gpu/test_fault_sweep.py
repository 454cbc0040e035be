"""Every driver call of a training step fails once: nothing may be lost, and a loss is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from softcuda.load import Softcuda

pytestmark = pytest.mark.gpu
SWEEP = Path(__file__).with_name("sweep.py")


def sweep(*arguments: str, backing: str = "managed") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SWEEP), *arguments],
        env={**os.environ, "UMEM_BACKING": backing},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


@pytest.mark.parametrize(
    ("backing", "essential"),
    [
        ("managed", "cuMemAllocManaged"),
        pytest.param("mapped", "cuMemAddressReserve", marks=pytest.mark.nightly),
    ],
)
def test_no_failure_of_a_driver_call_loses_anything(
    softcuda: Softcuda, nightly: bool, backing: str, essential: str
) -> None:
    done = sweep("--per-entry", "4" if nightly else "2", backing=backing)
    print(done.stdout)
    assert done.stdout.endswith("lost 0, races 0\n"), done.stdout + done.stderr
    assert done.returncode == 0
    # Essential entry points are called, and the program notices their failure.
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line}
    header = done.stdout.splitlines()[0].split()[2:]
    assert int(rows[essential][1 + header.index("raised")]) > 0
    assert int(rows["all"][1]) > 20


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        pytest.param("overwrite", "weight 1: values", marks=pytest.mark.nightly),
        pytest.param("discard", "weight 0: values", marks=pytest.mark.nightly),
        pytest.param("number", "parameter 0: wrong numbers", marks=pytest.mark.nightly),
        ("crash", "it crashes"),
        pytest.param("hang", "it hangs", marks=pytest.mark.nightly),
        pytest.param("leak", "stay alive", marks=pytest.mark.nightly),
        pytest.param("type", "raises KeyError", marks=pytest.mark.nightly),
    ],
)
def test_a_planted_loss_is_noticed(softcuda: Softcuda, plant: str, words: str) -> None:
    timeout = "20" if plant == "hang" else "120"
    done = sweep("--entry", "cuInit", "--timeout", timeout, "--plant", plant)
    lost = [line for line in done.stdout.splitlines() if line.startswith("lost: cuInit")]
    assert len(lost) == 3, done.stdout + done.stderr  # one with each error
    assert all(words in line for line in lost)
    assert done.returncode == 1


def test_a_planted_race_is_noticed(softcuda: Softcuda) -> None:
    done = sweep("--entry", "cuInit", "--plant", "race")
    races = [line for line in done.stdout.splitlines() if line.startswith("race: cuInit")]
    assert len(races) == 2, done.stdout + done.stderr  # in the third case the device is lost
    assert all("aten::fill_.Scalar writes" in line for line in races)
    assert done.stdout.endswith("lost 0, races 2\n")
    assert done.returncode == 1
