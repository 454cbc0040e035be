"""Rules of the project that hold for every file or every test."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import affected_tests
import pytest
from support import forkserver

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_has_exactly_one_marker(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        marks = {mark.name for mark in item.iter_markers()} & {"cpu", "gpu"}
        assert len(marks) == 1, item.nodeid


@pytest.mark.parametrize(
    ("marks", "code", "words"),
    [
        ("", 0, "1 passed"),
        ("@pytest.mark.cpu", 0, "1 passed"),
        ("@pytest.mark.cpu\n@pytest.mark.gpu", 4, "is marked both cpu and gpu"),
        ("@pytest.mark.slow", 2, "'slow' not found"),
    ],
)
def test_markers_are_checked(tmp_path: Path, marks: str, code: int, words: str) -> None:
    program = f"import pytest\n\n{marks}\ndef test_it(): pass\n"
    done = _run_tests(tmp_path, program, "-p", "no:cacheprovider")
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stdout + done.stderr


@pytest.mark.parametrize("cases", [1, 3])
def test_a_profile_has_its_share_of_the_examples_that_each_test_asks_for(
    tmp_path: Path, cases: int
) -> None:
    """Once: the cases of a parametrized test share its settings, and ten of them ran for hours."""
    program = (
        "import pytest\nfrom hypothesis import given, settings, strategies\n\n"
        f"@pytest.mark.parametrize('case', range({cases}))\n"
        "@settings(max_examples=8, database=None)\n@given(strategies.integers())\n"
        "def test_it(case, x): print('ran')\n"
    )
    for arguments, examples in (
        ([], 4),
        (["--hypothesis-profile=random"], 8),
        (["--hypothesis-profile=nightly"], 24),
    ):
        done = _run_tests(tmp_path, program, "-s", *arguments)
        assert done.stdout.count("ran") == examples * cases


def test_what_takes_too_long_for_ci_runs_with_the_nightly_profile_only(tmp_path: Path) -> None:
    program = "import pytest\n\n@pytest.mark.nightly\ndef test_it(): print('ran')\n"
    assert "ran" not in _run_tests(tmp_path, program, "-s").stdout.split()
    nightly = _run_tests(tmp_path, program, "-s", "--hypothesis-profile=nightly")
    assert "1 passed" in nightly.stdout


def test_what_each_test_takes_is_recorded(tmp_path: Path) -> None:
    _run_tests(tmp_path, "import time\n\ndef test_it(): time.sleep(0.25)\n")
    seconds = json.loads((tmp_path / affected_tests.DURATIONS).read_text())
    assert list(seconds) == ["test_it.py::test_it"]
    assert 0.25 <= seconds["test_it.py::test_it"] < 60


LEAVING_TENSORS = """
import pytest, torch
kept = []

@pytest.fixture
def tensor(on):
    return torch.ones(1 << 20)

def test_fails(on):
    tensor = torch.ones(1 << 20)
    assert not tensor.any()

def test_fails_with_a_fixture(tensor):
    assert not tensor.any()

@pytest.mark.xfail(raises=KeyError)
def test_is_expected_to_fail(tensor):
    {}[tensor]

def test_passes(tensor): pass

def test_keeps(tensor):
    kept.append(tensor)

def test_keeps_nothing(tensor): pass
"""


def test_only_a_test_that_keeps_tensors_is_reported_for_them(tmp_path: Path) -> None:
    """A failed test's tensors, which its traceback held, made every later one an error."""
    (folder := tmp_path / "integration").mkdir()
    (folder / "conftest.py").write_text((ROOT / "tests/integration/conftest.py").read_text())
    (folder / "test_tensors.py").write_text(LEAVING_TENSORS)
    done = _run_tests(tmp_path, "", "-rA", "-p", "no:cacheprovider")
    outcomes = re.findall(r"^(ERROR|FAILED) \S+::(test_\w+) - (.*)", done.stdout, re.MULTILINE)
    assert [(kind, name) for kind, name, _ in outcomes] == [
        ("ERROR", "test_keeps"), ("FAILED", "test_fails"), ("FAILED", "test_fails_with_a_fixture"),
    ], done.stdout  # fmt: skip
    assert "the test left" in outcomes[0][2]


def _run_tests(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of one file with the conftest of this project, in `folder`."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    cpu: c\n    gpu: g\n    nightly: n\n"
        "addopts = --strict-markers -p no:randomly\n"
    )
    (folder / "test_it.py").write_text(program)
    return forkserver.run(
        ["-m", "pytest", *arguments, str(folder)],
        folder=folder,
        prepare="import hypothesis, pytest",
    )


def test_setup_py_stays_thin() -> None:
    assert len((ROOT / "setup.py").read_text().splitlines()) <= 60


def test_the_public_names_are_documented_and_exist() -> None:
    import umem

    for name in umem.__all__:
        assert getattr(umem, name) is not None
        if name != "__version__":
            assert getattr(umem, name).__doc__, name


def test_type_checkers_see_the_public_names() -> None:
    """The block for type checkers in a façade says what its table says."""
    import umem
    from umem import policies

    for module in (umem, policies):
        assert module.__file__ is not None
        source = Path(module.__file__).read_text()
        names = set(re.findall(r"^    from \S+ import (\w+) as \1$", source, re.MULTILINE))
        own = {"enable"} if module is umem else set()  # defined there
        assert names | own == {*module.__all__, *getattr(module, "_MODULES", ())}, module


def test_no_module_has_the_name_of_a_public_function_next_to_it() -> None:
    """Importing the module would put it in the function's place."""
    import pkgutil

    import umem
    from umem import policies

    for package in (umem, policies):
        modules = {found.name for found in pkgutil.iter_modules(package.__path__)}
        assert modules & {*package.__all__} == set(), package


def test_files_that_comments_and_pages_name_exist() -> None:
    path = re.compile(
        r"(?<![\w/.*-])(?:umem|src|tests|bench|tools|docs|examples|packaging)/[\w/.-]+"
        r"\.(?:py|pyi|h|cpp|def|js|md|json|toml)\b"
    )
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    for folder, kinds in (("umem", (".py", ".pyi")), ("src", (".h", ".cpp")), ("tools", (".py",))):
        texts += [file for file in (ROOT / folder).rglob("*") if file.suffix in kinds]
    missing = [
        f"{text.relative_to(ROOT)}: {name}"
        for text in texts
        for name in path.findall(text.read_text(encoding="utf-8"))
        if not (ROOT / name).is_file() and not (ROOT / "docs" / name).is_file()
    ]
    assert missing == []


def test_every_error_class_has_a_section_in_the_docs() -> None:
    from umem import errors

    page = (ROOT / "docs" / "errors.md").read_text()
    classes = [name for name, kind in vars(errors).items() if isinstance(kind, type)]
    for name in classes:
        assert re.search(rf"^## `{name}`", page, re.MULTILINE), name


RECORDS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem[:4])
def test_a_decision_record_has_its_form_and_a_row_in_the_index(path: Path) -> None:
    head = re.match(
        r"# (\d{4}): (.+)\n\nDate: (\d{4}-\d\d-\d\d)\n"
        r"Status: (proposed|accepted|superseded by \d{4})\n",
        path.read_text(),
    )
    assert head is not None, "title, date and status: see docs/decisions/README.md"
    number, title, date, status = head.groups()
    assert path.name.startswith(f"{number}-")
    sections = re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE)
    assert sections == ["Question", "Facts", "Decision", "Consequences"]
    index = (path.parent / "README.md").read_text()
    assert f"| [{number}]({path.name}) | {title} | {date} | {status} |" in index


def test_decision_records_are_numbered_without_gaps() -> None:
    assert [int(path.name[:4]) for path in RECORDS] == list(range(1, len(RECORDS) + 1))
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    assert len(re.findall(r"^\| \[\d{4}\]", index, re.MULTILINE)) == len(RECORDS) > 0


def test_the_stub_names_what_the_native_core_has() -> None:
    from umem.base.native import core

    stub = (ROOT / "umem" / "_core.pyi").read_text()
    functions = re.findall(r"^def (\w+)\(", stub, re.MULTILINE)
    assert len(functions) > 20
    assert [name for name in functions if not hasattr(core, name)] == []
    fields = re.findall(r"^    (\w+): ", stub.partition("class Options:")[2].partition("class")[0],
                        re.MULTILINE)  # fmt: skip
    assert [name for name in fields if not hasattr(core.Options(), name)] == []


def test_files_are_looked_up_by_functions_that_return_false() -> None:
    """Path.is_file and the like raise for a name that is too long, or a closed folder."""
    raising = re.compile(r"\.(exists|is_file|is_dir|is_mount)\(\)(?!`)")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / "umem").rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if raising.search(line)
    ]
    assert found == []
