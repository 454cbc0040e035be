"""The native stress programs under the sanitizers: every tests/native/*.cpp, built by CMake."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What each program needs for a good run under the slowest sanitizer.
ARGUMENTS = {
    "stress_runtime": ["120"],
    "stress_engine": ["200"],
    "stress_devices": ["400"],
    "stress_observers": ["150"],
    "stress_reader": [str(ROOT / "tests/fuzz/corpus/trace"), "40"],
    "check_assert": ["on"],
}


def tool(name: str) -> str:
    """A build tool of this environment, or of the machine."""
    scripts = sysconfig.get_path("scripts")
    found = shutil.which(name, path=os.pathsep.join([scripts, os.environ["PATH"]]))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def configure(folder: Path, *settings: str) -> None:
    run(
        [
            tool("cmake"),
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DUMEM_BUILD_NATIVE_TESTS=ON",
            "-DUMEM_BUILD_BINDINGS=OFF",
            *settings,
            "-B",
            str(folder),
            "-S",
            str(ROOT),
        ]
    )


def run(command: list[str], **extra: str) -> None:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=dict(os.environ, **extra),
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_stress_programs_are_clean(sanitizer: str, tmp_path: Path) -> None:
    configure(tmp_path, f"-DUMEM_SANITIZE={sanitizer}", "-DCMAKE_BUILD_TYPE=Release")
    run([tool("cmake"), "--build", str(tmp_path)])
    programs = sorted(path.stem for path in (ROOT / "tests/native").glob("*.cpp"))
    assert programs
    for program in programs:
        run(
            [str(tmp_path / program), *ARGUMENTS.get(program, [])],
            ASAN_OPTIONS="detect_leaks=0:abort_on_error=0",
            UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1",
            TSAN_OPTIONS="halt_on_error=1",
        )


@pytest.mark.parametrize(
    ("settings", "asserts"),
    [
        (["-DCMAKE_BUILD_TYPE=Release"], "off"),
        (["-DCMAKE_BUILD_TYPE=Debug"], "on"),
        (["-DCMAKE_BUILD_TYPE=Release", "-DUMEM_SANITIZE=undefined"], "on"),
    ],
)
def test_a_build_asserts_only_where_it_is_developed(
    settings: list[str], asserts: str, tmp_path: Path
) -> None:
    configure(tmp_path, *settings)
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    program = ROOT / "tests/native/check_assert.cpp"
    command = next(c["command"] for c in commands if Path(c["file"]) == program)
    sources = [program, ROOT / "src/base/assert.cpp", ROOT / "src/residency/ledger.cpp"]
    built = str(tmp_path / "check_assert")
    # The build's own flags, on the program and the two sources that it needs.
    flags = command[: command.index(" -o ")].split()
    run([*flags, *map(str, sources), "-o", built])
    run([built, asserts])
