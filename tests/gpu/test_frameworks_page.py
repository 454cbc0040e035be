"""The examples of docs/frameworks.md, verbatim."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^## (.+?)\n|```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)


def _by_title() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    title = ""
    for heading, code in EXAMPLES:
        title = heading or title
        if code:
            found.setdefault(title, []).append(code)
    return found


def _reason(title: str) -> str | None:
    module = {"CuPy": "cupy", "Numba": "numba_cuda", "cuda.core": "cuda"}.get(title)
    if module and importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    if title in ("CuPy", "Numba") and os.environ.get("SOFTCUDA_LIB"):
        return "its own CUDA runtime refuses the software driver"
    return None


def test_every_framework_has_its_example() -> None:
    assert {title: len(codes) for title, codes in _by_title().items()} == {
        "CuPy": 1, "cuda.core": 1, "Numba": 1, "umem.Buffer": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("title", "number"), [("CuPy", 0), ("cuda.core", 0), ("Numba", 0), ("umem.Buffer", 0)]
)
def test_example(
    program: Callable[..., tuple[str, str]], tmp_path: Path, title: str, number: int
) -> None:
    if (reason := _reason(title)) is not None:
        pytest.skip(reason)
    path = tmp_path / "example.py"  # a file, because Numba reads the source of kernels
    path.write_text(_by_title()[title][number])
    program(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')\n")
