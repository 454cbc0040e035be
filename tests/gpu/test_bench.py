"""The GPU bench from end to end, tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.nightly]
ROOT = Path(__file__).resolve().parents[2]


def run(*words: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench/gpu/run.py"), *words, "--smoke", "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)


def test_the_smoke_run_measures_every_letter(tmp_path: Path) -> None:
    done = run(out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert {row[0].strip("| "): row[-1].strip(" |") for row in rows} == dict.fromkeys(
        "abcdefg", "ran"
    )
    (data,) = tmp_path.glob("gpu_*.json")
    report = json.loads(data.read_text())
    parts = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("gpu-parts/*.json")}
    assert {part["status"] for part in parts.values()} == {"done"}
    assert "oversubscription" not in parts
    most = report["machine"]["gpu_free_bytes"] // 4
    assert all(0 <= part["details"]["managed_peak_bytes"] <= most for part in parts.values())
    ways = {row["way"] for row in parts["outofcore"]["details"]["outofcore"]["resnet50"]["rows"]}
    assert ways == {"plain", "save_on_cpu", "checkpoint", "none", "lru", "auto"}
    joined = run("report", out=tmp_path)  # from existing results
    assert (joined.returncode, joined.stdout) == (0, done.stdout)
