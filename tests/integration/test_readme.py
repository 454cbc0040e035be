"""The README's example, as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_first_example_does_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    match = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert match is not None
    program = match[1] + (
        "stats = umem.stats()\n"
        "assert stats.peak_resident_bytes <= stats.budget_bytes == 32 << 20\n"
        "assert stats.peak_live_bytes > 300 << 20\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "2", "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
    )
    assert done.returncode == 0, done.stderr
    assert "32 MiB" in done.stdout


def test_its_outputs_are_those_of_a_kept_run() -> None:
    readme = (ROOT / "README.md").read_text()
    page = re.search(r"\((bench/results/plan_[^)]+\.md)\)", readme)
    assert page is not None
    kept = (ROOT / page[1]).read_text().splitlines()
    shown = re.findall(r"^\$ (umem (?:plan|replay) .*)\n((?:.+\n)+?)```", readme, re.MULTILINE)
    assert len(shown) == 2
    for command, output in shown:
        assert any(line.startswith(f"$ {command}") for line in kept), command
        assert [line for line in output.splitlines() if line not in kept] == []
