"""The native stress programs under the sanitizers: every tests/native/*.cpp, built by CMake."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What each program needs for a good run under the slowest sanitizer.
ARGUMENTS = {"stress_runtime": ["120"], "stress_engine": ["200"], "stress_observers": ["150"]}


def tool(name: str) -> str:
    """A build tool of this environment, or of the machine."""
    scripts = sysconfig.get_path("scripts")
    found = shutil.which(name, path=os.pathsep.join([scripts, os.environ["PATH"]]))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


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
    run(
        [
            tool("cmake"),
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DUMEM_SANITIZE={sanitizer}",
            "-DUMEM_BUILD_NATIVE_TESTS=ON",
            "-DUMEM_BUILD_BINDINGS=OFF",
            "-DCMAKE_BUILD_TYPE=Release",
            "-B",
            str(tmp_path),
            "-S",
            str(ROOT),
        ]
    )
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
