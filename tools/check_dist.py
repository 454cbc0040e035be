"""Checks the wheel and the sdist in a folder as a user gets them (`make dist`).

The wheel: its contents, its manylinux tag, and that it works in an empty environment without torch
and without a compiler. The sdist: it installs by its own Makefile, and tests pass from it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Tests that read the whole tree (docs, tools, bench), some of the native core, and some of torch.
TESTS = (
    "tests/arch", "tests/unit/test_cli.py", "tests/unit/test_config.py", "tests/unit/test_bench.py",
    "tests/native/test_replay.py", "tests/integration/test_readme.py",
    "tests/integration/test_tags.py",
)  # fmt: skip
# The oldest glibc that wheels promise to run on (PEP 600), as in [tool.cibuildwheel].
GLIBC = (2, 28)
# Each with its exit code: without torch, doctor reports that umem cannot work there yet.
COMMANDS = (
    (0, ("python", "-c", "import umem, umem.errors")),
    (0, ("umem", "--help")),
    (1, ("umem", "doctor")),
)


def wheel_problems(names: Iterable[str]) -> list[str]:
    """Return the problems of a wheel's list of files; empty for a sound wheel."""
    files = set(names)
    found = [f"{name}: built for one torch" for name in files if "_torch_ext-" in name]
    found += [f"{name}: for tests only" for name in files if "testing" in name]
    # Beside the package, since a program's own umem.py may hide that.
    foreign = {name.partition("/")[0] for name in files} - {"umem", "_umem_autoload.py"}
    found += [f"{name}/ is not umem's" for name in foreign if not name.endswith(".dist-info")]
    wanted = {
        "the native core": r"umem/_core\.cpython-[\w-]+-linux-gnu\.so",
        "libumem.so": r"umem/libumem\.so",
        "the sources of the torch extension": r"umem/_src/torch_ext/\w+\.cpp",
        "py.typed": r"umem/py\.typed",
        "the license": r"umem-[^/]*\.dist-info/licenses/LICENSE",
    }
    for what, pattern in wanted.items():
        if not any(re.fullmatch(pattern, name) for name in files):
            found.append(f"{what} is missing")
    return sorted(found)


def check_wheel(wheel: Path, work: Path) -> None:
    """Check the wheel's files and tag, then use it in an otherwise empty environment."""
    with zipfile.ZipFile(wheel) as archive:
        problems = wheel_problems(archive.namelist())
    if problems:
        raise SystemExit("\n".join(f"{wheel.name}: {problem}" for problem in problems))
    shown = _run([sys.executable, "-m", "auditwheel", "show", str(wheel)])
    tag = re.search(r'platform tag:\s*"manylinux_(\d+)_(\d+)_', shown)
    if tag is None:
        raise SystemExit(f"{wheel.name} runs on no manylinux:\n{shown}")
    print(f"{wheel.name} qualifies for manylinux_{tag[1]}_{tag[2]}")
    if (int(tag[1]), int(tag[2])) > GLIBC:
        print("  (not for publishing: the image of cibuildwheel has an older glibc)")
    place = work / "wheel"
    venv.create(place, with_pip=True)
    _run([str(place / "bin" / "python"), "-m", "pip", "install", "-q", str(wheel)])
    bare = {"PATH": "", "HOME": str(work)}  # no compiler is found, and no cache
    for code, (command, *words) in COMMANDS:
        _run([str(place / "bin" / command), *words], code, env=bare, cwd=work)
    print(f"{wheel.name} works without torch and without a compiler")


def check_sdist(sdist: Path, work: Path, torch: str) -> None:
    """Install the sdist by its own Makefile, and run tests from it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(work, filter="data")
    tree = work / sdist.name.removesuffix(".tar.gz")
    make = ["make", "-C", str(tree), f"VENV={work / 'sdist'}", f"TORCH={torch}"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    subprocess.run([*make, "install"], check=True, env=own)
    subprocess.run([*make, "test", f"PYTEST_ARGS=-q {' '.join(TESTS)}"], check=True, env=own)
    print(f"{sdist.name}: it installs, and tests pass")


def _run(command: list[str], code: int = 0, **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode != code:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return str(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="contains one wheel and one sdist")
    parser.add_argument("--torch", default="torch", help="requirement that the tests install")
    args = parser.parse_args()
    (wheel,) = args.folder.resolve().glob("*.whl")
    (sdist,) = args.folder.resolve().glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as work:
        check_wheel(wheel, Path(work))
        check_sdist(sdist, Path(work), args.torch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
