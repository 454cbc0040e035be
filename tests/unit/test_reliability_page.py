"""docs/reliability.md names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 15
    for path, function in named:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert function == "" or f"def {function}(" in text, f"{path}::{function}"
