"""The mechanical rules of the project's language; ruff's D401 checks the imperative first line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = [path for folder in ("umem", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
# A docstring that opens so is no noun phrase and no instruction.
OPENINGS = {"What", "Who", "Whose", "Of", "Where", "Which", "Those", "How"}
# The standard words are: again, no one or a role (the program, the caller).
WORDS = re.compile(r"\b(anew|nobody|somebody|anybody)\b", re.IGNORECASE)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_open_with_what_the_thing_is_or_does(path: Path) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for line, text in docstrings(path)
        if text.split()[0].strip("`*:,") in OPENINGS
    ]
    assert found == []


@pytest.mark.parametrize("path", [*CODE, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_words_are_the_usual_ones(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [f"{i}: {line.strip()}" for i, line in enumerate(lines, 1) if WORDS.search(line)]
    assert found == []
