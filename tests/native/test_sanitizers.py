"""The native code under the sanitizers: every tests/native/*.cpp, and a training in Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import umem

pytestmark = pytest.mark.sanitizers

ROOT = Path(__file__).parents[2]
TRAINING = Path(__file__).with_name("sanitized_training.py")
# Each program's seconds under the slowest sanitizer.
ARGUMENTS = {
    "stress_runtime": ["120"],
    "stress_engine": ["200"],
    "stress_disk": ["300"],
    "stress_devices": ["400"],
    "stress_observers": ["150"],
    "check_assert": ["on"],
}


@dataclass(frozen=True)
class Sanitizer:
    """How it is built, how it runs, and a fault that it must report."""

    flags: str
    libraries: tuple[str, ...]
    environ: dict[str, str]
    in_python: dict[str, str]  # together with Python and torch, which are built without it
    plant: str
    report: str


# SIGSEGV is umem's in both: a page fault of the software device.
SANITIZERS = {
    "asan": Sanitizer(
        "address,undefined",
        ("libasan.so", "libubsan.so"),
        {
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        },
        {"ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:handle_sigbus=0:use_sigaltstack=0"},
        "overrun",
        "heap-buffer-overflow",
    ),
    "tsan": Sanitizer(
        "thread",
        ("libtsan.so",),
        {"TSAN_OPTIONS": "halt_on_error=1"},
        {"TSAN_OPTIONS": "halt_on_error=1:handle_segv=0:handle_sigbus=0:die_after_fork=0"},
        "race",
        "data race",
    ),
}


@dataclass(frozen=True)
class Built:
    """The native code, built for a sanitizer."""

    sanitizer: Sanitizer
    folder: Path


@pytest.fixture(scope="module", params=SANITIZERS)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, nightly: bool
) -> Iterator[Built]:
    sanitizer, folder = SANITIZERS[request.param], tmp_path_factory.mktemp("build")
    settings = [
        f"-DUMEM_SANITIZE={sanitizer.flags}",
        "-DCMAKE_BUILD_TYPE=Release",
        "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -g1",  # which is built in half the time
    ]
    if nightly:
        settings += [f"-DUMEM_VERSION={umem.__version__}"]
        settings += ["-DUMEM_BUILD_BINDINGS=ON", f"-Dpybind11_DIR={pybind11_folder()}"]
    configure(folder, *settings)
    run([tool("cmake"), "--build", str(folder)])
    yield Built(sanitizer, folder)
    shutil.rmtree(folder)


def pybind11_folder() -> str:
    done = execute([sys.executable, "-m", "pybind11", "--cmakedir"])
    assert done.returncode == 0, f"install pybind11>=3: {done.stderr}"
    return done.stdout.strip()


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
    done = execute(command, **extra)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def execute(command: list[str], **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=dict(os.environ, **extra),
    )


def test_stress_programs_are_clean(built: Built) -> None:
    programs = sorted(path.stem for path in (ROOT / "tests/native").glob("*.cpp"))
    assert programs
    for program in programs:
        command = [str(built.folder / program), *ARGUMENTS.get(program, [])]
        run(command, **built.sanitizer.environ)


def train(built: Built, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the training with the built core, and the installed torch extension."""
    site = built.folder / "site"
    if not site.exists():
        unbuilt = shutil.ignore_patterns("*.so*", "_src", "__pycache__")
        shutil.copytree(Path(umem.__file__).parent, site / "umem", ignore=unbuilt)
        for library in [built.folder / "libumem.so", *built.folder.glob("_core*.so")]:
            shutil.copy(library, site / "umem")
    found = (execute(["gcc", f"-print-file-name={name}"]) for name in built.sanitizer.libraries)
    libraries = " ".join(done.stdout.strip() for done in found)
    environ = built.sanitizer.environ | built.sanitizer.in_python
    # Without -R, addresses are random where TSan has its own: "unexpected memory mapping".
    return execute(
        ["setarch", "-R", sys.executable, "-P", str(TRAINING), str(site), *arguments],
        **environ, LD_PRELOAD=libraries, PYTHONPATH=str(site), OMP_NUM_THREADS="1",
    )  # fmt: skip


def test_a_training_is_clean(built: Built, nightly: bool) -> None:
    pytest.importorskip("torch")
    if not nightly:
        pytest.skip("the build of the module for Python takes minutes: make test-asan test-tsan")
    done = train(built)
    assert (done.returncode, done.stdout) == (0, "fine\n"), (done.stdout + done.stderr)[-6000:]
    assert "ERROR" not in done.stderr
    assert "WARNING: ThreadSanitizer" not in done.stderr
    planted = train(built, built.sanitizer.plant)
    assert planted.returncode != 0
    assert built.sanitizer.report in planted.stderr, planted.stderr[-6000:]


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
