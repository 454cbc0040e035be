"""Building the CUDA part of the torch extension."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from umem.integrations.torch import build

SOURCES = Path(__file__).resolve().parents[2] / "src"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


@pytest.fixture
def flags() -> list[str]:
    if (problem := build.cuda_problem()) is not None:
        pytest.skip(problem)
    return build.compile_flags(SOURCES, True)


def compiles(flags: list[str], unit: Path) -> None:
    command = ["c++", *flags, "-Werror", "-fsyntax-only", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "unit", sorted((SOURCES / "torch_ext" / "cuda").glob("*.cpp")), ids=lambda path: path.stem
)
def test_it_compiles_without_warnings(flags: list[str], unit: Path) -> None:
    compiles(flags, unit)


def test_it_compiles_with_what_torchs_wheels_bring(flags: list[str], tmp_path: Path) -> None:
    include = Path(flags[flags.index("-DUMEM_WITH_CUDA") + 2])
    for path in include.iterdir():
        if path.name != "crt":  # from a package that torch does not require
            (tmp_path / path.name).symlink_to(path)
    flags[flags.index(str(include))] = str(tmp_path)
    compiles(flags, SOURCES / "torch_ext" / "cuda" / "forwards.cpp")
