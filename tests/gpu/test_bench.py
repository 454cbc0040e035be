"""The GPU bench from end to end, tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.nightly]
ROOT = Path(__file__).resolve().parents[2]
WORDS = ("a", "b", "outofcore_resnet50_b128")  # c and d have the same code


def run(*words: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench/gpu/run.py"), *words, "--smoke", "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)


def test_the_smoke_run_measures_everything(tmp_path: Path) -> None:
    done = run(*WORDS, out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("gpu-parts/*.json")}
    assert set(parts) == {"bits", "ways", "calls", "contents", "fits", "outofcore_resnet50_b128"}
    (data,) = tmp_path.glob("gpu_*.json")
    most = json.loads(data.read_text())["machine"]["gpu_free_bytes"] // 4
    for name, part in parts.items():
        assert (part["status"], part["errors"]) == ("done", {}), name
        assert "not_measured" not in part["details"], name
        assert 0 < part["details"]["managed_peak_bytes"] <= most, name
    weights = parts["bits"]["details"]["weights"]["resnet_smoke"]
    evictions = [row["evictions"] for row in weights.values()]
    assert evictions[:2] == [0, 0]
    assert min(evictions[2:]) > 0
    ways = {row["way"] for row in parts["outofcore_resnet50_b128"]["details"]["rows"]}
    assert ways == {
        "torch", "save_on_cpu", "auto/mapped", "lru/mapped", "auto/managed", "lru/managed",
    }  # fmt: skip
    joined = run("report", out=tmp_path)  # from what is there
    assert (joined.returncode, joined.stdout) == (0, done.stdout)
    (page,) = tmp_path.glob("gpu_*.md")
    assert "auto/mapped at 0.50 of the peak: to the lower bound" in page.read_text()
