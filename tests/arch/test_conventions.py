"""Rules of the project that hold for every file or every test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    cpu: c\n    gpu: g\naddopts = --strict-markers\n"
    )
    (tmp_path / "test_it.py").write_text(f"import pytest\n\n{marks}\ndef test_it(): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stdout + done.stderr


def test_setup_py_stays_thin() -> None:
    assert len((ROOT / "setup.py").read_text().splitlines()) <= 60


def test_the_public_names_are_documented_and_exist() -> None:
    import umem

    for name in umem.__all__:
        assert getattr(umem, name) is not None
        if name != "__version__":
            assert getattr(umem, name).__doc__, name


def test_every_error_class_has_a_section_in_the_docs() -> None:
    from umem import errors

    page = (ROOT / "docs" / "errors.md").read_text()
    classes = [name for name, kind in vars(errors).items() if isinstance(kind, type)]
    for name in classes:
        assert re.search(rf"^## `{name}`", page, re.MULTILINE), name


def test_the_stub_names_what_the_native_core_has() -> None:
    from umem.native import core

    stub = (ROOT / "umem" / "_core.pyi").read_text()
    functions = re.findall(r"^def (\w+)\(", stub, re.MULTILINE)
    assert len(functions) > 20
    assert [name for name in functions if not hasattr(core, name)] == []
    fields = re.findall(r"^    (\w+): ", stub.partition("class Options:")[2].partition("class")[0],
                        re.MULTILINE)  # fmt: skip
    assert [name for name in fields if not hasattr(core.Options(), name)] == []
