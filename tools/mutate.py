"""Makes the defects of mutants.py one by one, and reports the test that finds each.

python tools/mutate.py [--only WORDS] [--folder DIR]

Works on a copy of the sources, and needs CMake, a compiler, and umem installed for this Python. The
defects in stream order are tried if SOFTCUDA_LIB and --cuda-python name the software driver and a
Python with the CUDA build of torch. The exit code is 1 if a defect survives its tests.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 600  # for the tests of one defect: a hang counts as found


def installed(python: str) -> Path:
    """Return the folder of the umem that is installed for `python`."""
    code = "import umem._core, pathlib; print(pathlib.Path(umem._core.__file__).parent)"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def _copy_changed(source: str, target: str) -> None:
    """Copy a file, unless the target is the same: its time decides about compiling."""
    data = Path(source).read_bytes()
    if not Path(target).exists() or Path(target).read_bytes() != data:
        Path(target).write_bytes(data)


class Workshop:
    """A copy of the sources, its build, and a package with that for each Python."""

    def __init__(self, folder: Path, pythons: Sequence[str]) -> None:
        self.tree, self.build = folder / "tree", folder / "build"
        self.sites = {python: folder / f"site{i}" for i, python in enumerate(pythons)}
        shutil.copytree(
            ROOT / "src", self.tree / "src", dirs_exist_ok=True, copy_function=_copy_changed
        )
        # A file at a time, as each defect changes one: 3 s, not 30.
        cmake = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
        (self.tree / "CMakeLists.txt").write_text(
            cmake.replace("UNITY_BUILD ON", "UNITY_BUILD OFF"), encoding="utf-8"
        )
        for python, site in self.sites.items():
            shutil.copytree(installed(python), site / "umem", dirs_exist_ok=True)
            # It would load the library next to it, and so without a defect.
            for module in installed(python).parent.glob("_core_testing*.so"):
                shutil.copy(module, site)

    def make(self) -> str:
        """Build, and put the result into the packages. Return the compiler's errors."""
        if not (self.build / "CMakeCache.txt").exists():
            warnings_off = "-DCMAKE_CXX_FLAGS=-w"  # unused code after a defect is not an error
            command = ["cmake", "-S", str(self.tree), "-B", str(self.build), warnings_off]
            command.append("-DUMEM_BUILD_BINDINGS=OFF")
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        done = subprocess.run(
            ["cmake", "--build", self.build, "--target", "umem", "--parallel"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            return done.stdout[-2000:] + done.stderr[-2000:]
        for site in self.sites.values():
            shutil.copy(self.build / "libumem.so", site / "umem")
        return ""

    def run(self, python: str, tests: Sequence[str]) -> str:
        """Return the first test that fails; empty if none does."""
        environ = os.environ | {"PYTHONPATH": str(self.sites[python]), "SOFTCUDA_PYTHON": python}
        process = subprocess.Popen(
            [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return "it hangs"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the programs of its tests
            process.wait()
        if process.returncode == 0:
            return ""
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return found[1] if found else f"the process ends with {process.returncode}"


def try_one(workshop: Workshop, mutant: Mutant, python: str) -> str:
    """Return the test that finds the defect; empty if none does.

    Raises:
        SystemExit: it does not compile.
    """
    path = workshop.tree / "src" / mutant.source
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        if errors := workshop.make():
            raise SystemExit(f"{mutant.name}: it does not compile:\n{errors}")
        return workshop.run(python, mutant.tests)
    finally:
        path.write_text(text, encoding="utf-8")


def mutate(mutants: Sequence[Mutant], folder: Path, cuda_python: str | None) -> int:
    """Try the defects, and return the number of those that survive."""
    python_of = {mutant: cuda_python if mutant.needs_cuda else sys.executable for mutant in mutants}
    chosen = {mutant: python for mutant, python in python_of.items() if python is not None}
    workshop = Workshop(folder, sorted(set(chosen.values())))
    if errors := workshop.make():
        raise SystemExit(errors)
    for tests, python in {(mutant.tests, python) for mutant, python in chosen.items()}:
        if failed := workshop.run(python, tests):
            raise SystemExit(f"{failed} fails without a defect")
    survivors = 0
    for mutant, python in chosen.items():
        started = time.monotonic()
        found = try_one(workshop, mutant, python)
        survivors += not found
        seconds = time.monotonic() - started
        print(
            f"{mutant.name} ({mutant.source}): {found or 'SURVIVES'} ({seconds:.0f} s)", flush=True
        )
    left_out = len(mutants) - len(chosen)
    print(f"{len(chosen)} defects, {survivors} survivors; {left_out} need the software driver")
    return survivors


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default="", help="defects with these words in name or source")
    parser.add_argument("--folder", type=Path, help="the build folder, reused if it exists")
    parser.add_argument("--cuda-python", help="a Python with umem and the CUDA build of torch")
    options = parser.parse_args(arguments)
    cuda = options.cuda_python if os.environ.get("SOFTCUDA_LIB") else None
    wanted = [m for m in MUTANTS if options.only in f"{m.name} {m.source}"]
    with tempfile.TemporaryDirectory() as temporary:
        return 1 if mutate(wanted, options.folder or Path(temporary), cuda) else 0


if __name__ == "__main__":
    sys.exit(main())
