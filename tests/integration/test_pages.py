"""The examples of the documentation's pages print what the pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("compile", "hints", "optimize", "optimizer_state", "policies", "streaming")


@pytest.mark.parametrize("name", PAGES)
def test_a_pages_example_prints_what_it_says(name: str, tmp_path: Path) -> None:
    page = (DOCS / f"{name}.md").read_text()
    match = re.search(r"```python\n(.*?)```\n\nIt prints\n\n```\n(.*?)```", page, re.DOTALL)
    assert match is not None
    done = subprocess.run(
        [sys.executable, "-c", match[1]],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == match[2]


def test_every_page_with_such_an_example_is_tested() -> None:
    pages = {path.stem for path in DOCS.glob("*.md") if "\nIt prints\n" in path.read_text()}
    assert pages == set(PAGES)
