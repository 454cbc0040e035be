"""The GPU bench from end to end, tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


def test_the_smoke_run_measures_every_part(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench/gpu/run.py"), "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    (data,) = tmp_path.glob("gpu_*.json")
    report = json.loads(data.read_text())
    parts = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("gpu-parts/*.json")}
    assert {part["status"] for part in parts.values()} == {"done"}
    assert {"micro_bandwidth", "micro_discard", "fits", "outofcore", "maxbatch", "peak"} <= set(
        parts
    )
    assert "oversubscription" not in parts
    most = report["machine"]["gpu_free_bytes"] // 4
    assert all(0 <= part["details"]["managed_peak_bytes"] <= most for part in parts.values())
    ways = {row["way"] for row in parts["outofcore"]["details"]["outofcore"]["resnet50"]["rows"]}
    assert ways == {"plain", "save_on_cpu", "checkpoint", "none", "lru"}
