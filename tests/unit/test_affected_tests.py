"""The choice of tests for `make check`, on small trees."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import affected_tests
import pytest

FILES = {
    "umem/__init__.py": "",
    "umem/low.py": "",
    "umem/middle.py": "def f():\n    from . import low\n",
    "umem/deep/__init__.py": "",
    "umem/deep/top.py": "from ..middle import f\n",
    "umem/deep/named.py": "",
    "umem/table.py": 'LAZY = {"x": ("deep.named", "X")}\n',
    "tests/unit/test_table.py": "from umem import table\n",
    "tests/unit/test_named.py": 'from importlib import *\nimport_module("umem.deep.named")\n',
    "bench/tool.py": "import umem.low as low\n",
    "tests/support/helper.py": "from umem.middle import f\n",
    "tests/arch/test_rules.py": "",
    "tests/unit/test_low.py": "from umem import low\n",
    "tests/unit/test_helped.py": "from support import helper\n",
    "tests/unit/test_top.py": "PROGRAM = '''\nimport os\nfrom umem.deep.top import f\n'''\n",
    "tests/unit/test_bench.py": "import tool\n",
    "tests/unit/test_loaded.py": 'def test_it(bench):\n    bench("tool")\n',
    "tests/unit/test_page.py": 'PAGE = "docs/errors.md"\nRECORDS = "decisions"\n',
    "tests/native/conftest.py": "",
    "tests/native/test_engine.py": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def chosen(root: Path, *changed: str) -> dict[str, int]:
    """Distance by stem of the test files that a change affects, without those of tests/arch."""
    choices = affected_tests.choose(root, list(changed), {})
    assert choices[0].path == "tests/arch/test_rules.py"
    assert choices[0].why == "always"
    return {Path(one.path).stem: one.distance for one in choices[1:]}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        # In functions, by relative names, through bench/ and through tests/support.
        (
            "umem/low.py",
            {"test_low": 1, "test_bench": 2, "test_loaded": 2, "test_helped": 3, "test_top": 3},
        ),
        ("umem/middle.py", {"test_helped": 2, "test_top": 2}),
        # In the text of a program that a test starts.
        ("umem/deep/top.py", {"test_top": 1}),
        ("bench/tool.py", {"test_bench": 1, "test_loaded": 1}),
        # By a name in a table of lazy imports, and in a call.
        ("umem/deep/named.py", {"test_named": 1, "test_table": 2}),
        ("tests/unit/test_low.py", {"test_low": 0}),
        ("tests/native/conftest.py", {"test_engine": 1}),
        ("src/base/units.h", {"test_engine": 1}),
        ("CMakeLists.txt", {"test_engine": 1}),
        ("docs/errors.md", {"test_page": 1}),
        ("docs/decisions/0001-x.md", {"test_page": 1}),
        ("docs/other.md", {}),
    ],
)
def test_what_reaches_the_change_is_chosen_the_nearest_first(
    root: Path, changed: str, expected: dict[str, int]
) -> None:
    found = chosen(root, changed)
    assert found == expected
    assert list(found.values()) == sorted(found.values())


def test_a_test_named_after_the_module_is_near_whatever_it_imports(root: Path) -> None:
    (root / "tests/unit/test_middle_rules.py").write_text("import subprocess\n")
    assert chosen(root, "umem/middle.py")["test_middle_rules"] == 1


@pytest.mark.parametrize("loader", ["bench", "module", "imported"])
def test_a_bench_is_known_by_the_name_that_a_test_loads(root: Path, loader: str) -> None:
    (root / "tests/unit/test_by_name.py").write_text(f'MADE = {loader}("tool")\n')
    assert chosen(root, "bench/tool.py")["test_by_name"] == 1


def test_importers_of_a_deleted_file_are_chosen(root: Path) -> None:
    (root / "umem/low.py").unlink()
    assert chosen(root, "umem/low.py")["test_low"] == 1


def test_the_budget_keeps_the_rules_and_the_nearest_test(root: Path) -> None:
    seconds = dict.fromkeys(FILES, 10.0) | {"tests/unit/test_low.py": 40.0}
    choices = affected_tests.choose(root, ["umem/low.py"], seconds)
    taken, left = affected_tests.within(choices, 5.0)
    assert [Path(one.path).stem for one in taken] == ["test_rules", "test_low"]
    assert [Path(one.path).stem for one in left] == [
        "test_bench", "test_loaded", "test_helped", "test_top",
    ]  # fmt: skip
    assert affected_tests.within(choices, 90.0)[1] == []
    # A file that does not fit does not exclude later ones.
    dear = affected_tests.choose(root, ["umem/low.py"], seconds | {"tests/unit/test_bench.py": 99})
    taken, left = affected_tests.within(dear, 90.0)
    assert [Path(one.path).stem for one in left] == ["test_bench"]


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def repository(root: Path) -> Path:
    git(root, "init", "--initial-branch=main")
    git(root, "add", ".")
    git(root, "commit", "-m", "all")
    return root


@needs_git
def test_the_change_is_what_is_not_committed_yet_or_the_last_commit(repository: Path) -> None:
    assert set(affected_tests.changed_files(repository, None)) == set(FILES)
    (repository / "umem/low.py").write_text("x = 1\n")
    (repository / "umem/new.py").write_text("")
    (repository / "bench/tool.py").unlink()
    expected = {"umem/low.py", "umem/new.py", "bench/tool.py"}
    assert set(affected_tests.changed_files(repository, None)) == expected


@needs_git
def test_a_base_adds_what_was_committed_since_the_branch_left_it(repository: Path) -> None:
    git(repository, "checkout", "-b", "work")
    (repository / "umem/low.py").write_text("x = 1\n")
    git(repository, "commit", "-am", "work")
    git(repository, "checkout", "main")
    (repository / "umem/middle.py").write_text("")
    git(repository, "commit", "-am", "elsewhere")
    git(repository, "checkout", "work")
    (repository / "bench/tool.py").write_text("")
    assert set(affected_tests.changed_files(repository, "main")) == {"umem/low.py", "bench/tool.py"}


@needs_git
def test_without_git_the_files_must_be_named(root: Path) -> None:
    with pytest.raises(SystemExit, match="name the changed files"):
        affected_tests.changed_files(root, None)


def test_recorded_times_are_summed_by_file(root: Path) -> None:
    assert affected_tests.recorded_seconds(root) == {}
    path = root / affected_tests.DURATIONS
    path.parent.mkdir(parents=True)
    path.write_text(
        json.dumps({"tests/a.py::x[1::2]": 1.5, "tests/a.py::y": 2, "tests/b.py::z": 1})
    )
    assert affected_tests.recorded_seconds(root) == {"tests/a.py": 3.5, "tests/b.py": 1.0}


def test_the_command_says_why_and_what_it_leaves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The order depends on what tests took here before.
    monkeypatch.setattr(affected_tests, "recorded_seconds", lambda _root: {})
    assert affected_tests.main(["--max-seconds", "0", "tools/affected_tests.py"]) == 0
    out, err = capsys.readouterr()
    assert "tests/arch/test_layers.py" in out.split()
    assert "imports tools/affected_tests.py" in err
    assert affected_tests.main(["--max-seconds", "0", "src/x.h"]) == 0
    out, err = capsys.readouterr()
    assert affected_tests.main(["--until", str(time.time()), "src/x.h"]) == 0
    assert capsys.readouterr().out == out
    later = str(time.time() + 3600)
    assert affected_tests.main(["--max-seconds", "0", "--until", later, "src/x.h"]) == 0
    assert {*capsys.readouterr().out.split()} > {*out.split()}
    assert "test_sanitizers" not in out
    assert re.search(r"left to `make test`: \d+ files, about \d+ s: tests/native/", err)
