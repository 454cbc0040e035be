"""The demo, the example and the bench as people start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import schemas
from support.frameworks import needs

pytest.importorskip("torch", reason="the demo trains with torch")
pytestmark = needs("sklearn")  # imported by the tests, and not at collection

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def start(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**os.environ, **environment},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize("workload", [pytest.param("resnet", marks=pytest.mark.nightly), "gpt"])
def test_the_quick_demo_is_identical_and_within_its_budget(workload: str, tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    done = start("-m", "umem", "demo", "--quick", "--steps", "3", "--workload", workload,
                 "--json", "--plot", str(picture))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = schemas.read("demo", done.stdout)
    assert report["good"] is True
    plain, fits, quarter = report["rows"]
    assert plain["policy"] == "plain torch"
    assert fits["out_per_step"] == 0
    assert 100 * MIB < fits["peak_bytes"] < 300 * MIB
    assert quarter["budget_bytes"] <= fits["peak_bytes"] / 4
    assert 0 < quarter["peak_resident_bytes"] <= quarter["budget_bytes"]
    assert quarter["out_per_step"] > 0
    assert quarter["in_per_step"] > 0
    assert {row["state_sha256"] for row in report["rows"]} == {plain["state_sha256"]}
    assert float.fromhex(plain["loss"]) < plain["first_loss"]
    assert picture.stat().st_size > 10_000


def test_a_gpu_that_umem_cannot_use_is_said_at_once() -> None:
    done = start("-m", "umem", "demo", "--device", "cuda")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "CUDA" in done.stderr or "no NVIDIA driver" in done.stderr  # by torch's build


@pytest.mark.nightly
def test_the_example_ends_the_same_with_a_quarter_of_its_memory() -> None:
    plain = start("examples/train_digits.py")
    assert plain.returncode == 0, plain.stderr
    last = plain.stdout.splitlines()[-1]
    assert last.startswith("final loss=0x1.")
    for done in (
        start("examples/train_digits.py", UMEM="1", UMEM_STRICT="1", UMEM_BUDGET="32MiB"),
        start("-m", "umem", "run", "--budget", "32MiB", "examples/train_digits.py"),
    ):
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == last


@pytest.mark.nightly
def test_the_bench_works() -> None:
    done = start("bench/cpu.py", "--smoke")
    assert done.returncode == 0, done.stdout + done.stderr
    for figure in ("resnet: fits, lru", "resnet: 1/4, lru", "observer", "alloc and free, umem 4MiB",
                   "alloc and free, glibc 256B", "one fault, in and out"):  # fmt: skip
        assert f"| {figure}" in done.stdout
    assert "NOT IDENTICAL" not in done.stdout
