"""The examples on two processes, as a launcher starts them: bits are those without umem."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed")

from umem.config.settings import child_environment

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def run(*words: str, **variables: str) -> str:
    environment = child_environment() | {"OMP_NUM_THREADS": "1", "UMEM_DEVICE": "soft"} | variables
    environment.pop("LOCAL_RANK", None)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**environment, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def last(output: str) -> str:
    (line,) = [line for line in output.splitlines() if line.startswith("final ")]
    return line


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("example", "budget"), [("ddp_digits.py", "32MiB"), ("fsdp2_gpt.py", "24MiB")]
)
def test_it_ends_the_same(example: str, budget: str, tmp_path: Path) -> None:
    program = f"examples/{example}"
    plain = last(run(*LAUNCH, program))
    under = run(*LAUNCH, program, UMEM="1", UMEM_SUMMARY="1", UMEM_BUDGET=budget)
    trace = str(tmp_path / "t.jsonl.gz")
    words = ("-m", "umem", "run", "--budget", budget, "--trace", trace, "torchrun", *LAUNCH[2:])
    started = run(*words, program)
    assert last(under) == last(started) == plain
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "t.rank0.jsonl.gz",
        "t.rank1.jsonl.gz",
    ]
    for output in (under, started):  # a line of each rank, and none of the launcher
        ends = re.findall(r"^umem(.*): \d+ steps, plan hits ([\d.]+) %", output, re.MULTILINE)
        assert sorted(who for who, _ in ends) == [" [rank 0]", " [rank 1]"]
        assert min(float(share) for _, share in ends) >= 95


def test_ray_train_ends_the_same() -> None:
    pytest.importorskip("ray")
    plain = last(run("examples/ray_digits.py"))
    assert "sha256=" in plain
    assert last(run("examples/ray_digits.py", UMEM="1", UMEM_BUDGET="32MiB")) == plain
