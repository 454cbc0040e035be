"""The defects of tools/mutants.py are about the sources as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_changes_one_place(mutant: Mutant) -> None:
    text = (ROOT / "src" / mutant.source).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    assert mutant.old != mutant.new
    assert all((ROOT / path).is_file() for path in mutant.tests)


def test_names_are_of_one_defect_each() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
