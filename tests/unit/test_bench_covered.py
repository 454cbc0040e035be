"""bench/covered.py over counts that are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.benches import imports

LOG = """\
....F                                                                    [100%]
FAILED tests/unit/test_a.py::test_it - AssertionError: 2 > 1
===== 1 failed, 4 passed, 2 skipped in 3.00s =====
...
===== 3 passed in 2.00s =====
"""


@pytest.fixture
def covered(monkeypatch: pytest.MonkeyPatch) -> Any:
    for module in imports(monkeypatch, "covered"):
        yield module("covered")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A commit whose tests ran."""
    counts = tmp_path / "c0ffee-counts"
    counts.mkdir()
    (tmp_path / "c0ffee").mkdir()
    (counts / "log").write_text(LOG)
    of_python = {
        name: {"summary": dict(zip(("num_statements", "covered_lines", "num_branches",
                                    "covered_branches"), numbers, strict=True))}
        for name, numbers in {
            "umem/base/a.py": (10, 9, 4, 3),
            "umem/base/b.py": (10, 10, 0, 0),
            "umem/c.py": (5, 0, 2, 0),
            "/elsewhere/umem/d.py": (7, 0, 0, 0),
        }.items()
    }  # fmt: skip
    (counts / "python.json").write_text(json.dumps({"files": of_python}))
    of_native = [
        {"filename": "src/arena/arena.cpp", "line_total": 8, "line_covered": 6, "branch_total": 4,
         "branch_covered": 1}
    ]  # fmt: skip
    (counts / "native.json").write_text(json.dumps({"files": of_native}))
    return tmp_path / "c0ffee"


def test_files_are_added_up_by_tree_and_by_room(covered: Any, clone: Path) -> None:
    sums = covered.sums(clone)
    assert sorted(sums) == ["src", "src/arena", "umem", "umem/base", "umem/c.py"]
    assert covered.share(sums["umem"], "lines") == 100 * 19 / 25
    assert covered.share(sums["umem/base"], "branches") == 75
    assert covered.share(sums["src"], "branches") == 25


def test_a_measured_commit_is_not_measured_again_and_failures_are_named(
    covered: Any, clone: Path
) -> None:
    row = covered.measured("c0ffee", clone, 1, {})
    assert row["tests"] == ["1 failed, 4 passed, 2 skipped in 3.00s", "3 passed in 2.00s"]
    assert row["failed"] == ["FAILED tests/unit/test_a.py::test_it"]


def test_a_measurement_that_was_interrupted_begins_again(
    covered: Any, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BeginsError(Exception):
        pass

    def prepare(_commit: str, its: Path) -> None:
        assert not its.exists()
        assert not covered.counts_of(its).exists()
        raise BeginsError

    monkeypatch.setattr(covered, "prepare", prepare)
    (covered.counts_of(clone) / "native.json").unlink()
    with pytest.raises(BeginsError):
        covered.measured("c0ffee", clone, 1, {})


def test_three_commits_are_refused_before_anything_is_measured(covered: Any) -> None:
    with pytest.raises(SystemExit):
        covered.main(["HEAD", "HEAD", "HEAD"])
