"""The bench of other libraries' programs, on the one that needs torch alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_the_smoke_run_prints_a_row_for_each_case() -> None:
    command = [sys.executable, str(ROOT / "bench" / "programs" / "run.py"), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| lstm")]
    assert [(row[1].split(",")[0], row[2]) for row in rows] == [
        (fraction, policy) for fraction in ("1/2", "1/4") for policy in ("auto", "lru")
    ]
    assert all(row[3] == "same" for row in rows)
    assert all(row[7] == "100 %" for row in rows if row[2] == "auto")
