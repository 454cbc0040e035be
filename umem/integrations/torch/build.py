"""Lookup and build of umem's C++ extension for the installed torch.

The extension depends on torch's C++ headers, whose layout changes with every release, so it is
built for the installed torch: when umem is installed without build isolation, or else at first use
into a per-user cache. This module imports nothing from umem at its top, so that setup.py can load
it by its path.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...base.progress import Advance

NAME = "_torch_ext"
LIBRARY = "libumem.so"
SECONDS = 20  # approximate duration of a build, for the progress line
SECONDS_CUDA = 30
_COMPILERS = ("c++", "g++", "clang++")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_CUDART_VERSION = re.compile(r"^#define CUDART_VERSION\s+(\d+)", re.MULTILINE)
_LOG_LINES = 6
_SEAL = b"\numem sha256 "
_COMPILER_BYTES = 2 << 30  # host memory per compiler: torch's headers are large
_PACKAGE = Path(__file__).resolve().parents[2]  # umem/

Log = Callable[[str], None]


def say(message: str) -> None:
    """Print one progress line to stderr; a closed stderr does not fail the build."""
    if sys.stderr is not None:  # print would use stdout instead
        with contextlib.suppress(OSError, ValueError):
            print(f"umem: {message}", file=sys.stderr, flush=True)


def find_or_build(
    cache_dir: Path | None = None,
    log: Log = say,
    *,
    package_dirs: Sequence[Path] | None = None,
    sources: Path | None = None,
    cxx: str | None = None,
) -> Path:
    """Return the extension for this torch: the installed one, a cached one, or a new build.

    Two processes that need it at the same time build it once: the second waits for the first. A
    damaged file is rebuilt: loading it could end the process. On a terminal, a bar shows how many
    of the compilers are done.

    Args:
        cache_dir: where built extensions are kept; None is `~/.cache/umem`.
        log: is called with each line of progress.
        package_dirs: directories of libumem.so and of extensions that were built at installation;
            None: umem's own.
        sources: the directory that holds `torch_ext/`; None: found next to the package.
        cxx: the compiler command; None is `$CXX`, then c++, g++, clang++.

    Raises:
        NotSupportedError: torch, a compiler, the sources or libumem.so are missing, the extension
            does not compile, the cache cannot be written, or another user can write to it.
    """
    from ...base.progress import progress

    dirs = list(package_dirs) if package_dirs is not None else own_dirs()
    source_dir = sources or _source_dir(dirs)
    cache = cache_dir or _home() / ".cache" / "umem"
    # An extension that was built with CUDA's headers also works where they are missing.
    kinds = [True, False] if _torch().version.cuda else [False]
    try:
        for with_cuda in kinds:
            file_name = _file_name(key(source_dir, with_cuda))
            installed = next(filter(is_whole, (folder / file_name for folder in dirs)), None)
            if installed is not None:
                return installed
            if _is_usable(cache / file_name):
                return cache / file_name
            if with_cuda and cuda_problem() is None:
                break
        _find_compiler(cxx)  # before the build is announced
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_cache(cache)
        with _locked(cache / f"{file_name}.lock", log):
            if not _is_usable(cache / file_name):
                if os.path.exists(cache / file_name):
                    log(f"{cache / file_name} is incomplete or damaged")
                torch_version = _torch().__version__
                log(
                    f"building the torch extension for torch {torch_version} "
                    f"(once, ~{SECONDS_CUDA if with_cuda else SECONDS} s) ..."
                )
                jobs = _default_jobs()
                parts = len(_batches(source_dir, with_cuda, jobs)) + 1  # and the link
                with progress("compiling", parts) as advance:
                    build(
                        cache, package_dirs=dirs, sources=source_dir, cxx=cxx, jobs=jobs,
                        advance=advance,
                    )  # fmt: skip
    except OSError as error:
        raise _not_supported(
            f"the cache directory {cache} for the torch extension cannot be used ({error}); "
            "set UMEM_TORCH_EXT_CACHE to a directory that can be written"
        ) from error
    return cache / file_name


def check_can_build(cache: Path) -> None:
    """Check that there is a compiler, and a place for what it makes.

    Raises:
        NotSupportedError: one of them is missing.
    """
    from ...base import paths

    _find_compiler(None)
    if not paths.can_hold(cache):
        raise _not_supported(
            f"the cache directory {cache} for the torch extension cannot be written; set "
            "UMEM_TORCH_EXT_CACHE to a directory that can be written"
        )


def build(
    out_dir: Path,
    *,
    package_dirs: Sequence[Path] | None = None,
    sources: Path | None = None,
    cxx: str | None = None,
    jobs: int | None = None,
    advance: Advance = lambda _: None,
) -> Path:
    """Compile and link the extension into `out_dir`, and return its path.

    The file appears there complete or not at all, and ends in a digest of its contents, which
    reveals later damage. On a compile error the whole log is written next to it. `jobs` is the
    number of concurrent compilers, among which the files are divided; None: as many as the machine
    has cores and memory for. `advance` is called with 1 at the end of each, from its thread, and
    for the link. The other arguments, and the errors, are those of `find_or_build`.

    Raises:
        OSError: `out_dir` cannot be written.
    """
    dirs = list(package_dirs) if package_dirs is not None else own_dirs()
    source_dir = sources or _source_dir(dirs)
    library_dir = _library_dir(dirs)
    compiler = _find_compiler(cxx)
    out_dir.mkdir(parents=True, exist_ok=True)
    with_cuda = cuda_problem() is None
    target = out_dir / _file_name(key(source_dir, with_cuda))
    log_path = target.with_suffix(".log")
    batches = _batches(source_dir, with_cuda, jobs or _default_jobs())

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        done = _run(command)
        advance(1)
        return done

    with tempfile.TemporaryDirectory(dir=out_dir, prefix="build-") as work:
        objects = [Path(work) / f"{i}.o" for i in range(len(batches))]
        compile_base = [*compiler, *compile_flags(source_dir, with_cuda)]
        commands = [
            [*compile_base, *compiled_together(batch), "-o", str(obj)]
            for batch, obj in zip(batches, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=len(batches)) as pool:
            _check(list(pool.map(run, commands)), Path(work), log_path)
        linked = Path(work) / target.name
        link = [*compiler, "-shared", *map(str, objects), *_link_flags(library_dir, with_cuda)]
        _check([run([*link, "-o", str(linked)])], Path(work), log_path)
        with linked.open("ab") as file:
            file.write(seal(linked.read_bytes()))
        linked.chmod(stat.S_IMODE(linked.stat().st_mode) & ~0o022)
        linked.replace(target)
    log_path.unlink(missing_ok=True)
    return target


def seal(content: bytes) -> bytes:
    """Return the end of an extension with this content: its digest, which the loader ignores.

    It is part of the file, so that one rename replaces both.
    """
    return _SEAL + hashlib.sha256(content).hexdigest().encode() + b"\n"


def is_whole(path: Path) -> bool:
    """Return whether the extension exists and is undamaged."""
    if not os.path.isfile(path):
        return False
    data = path.read_bytes()
    content = data.rpartition(_SEAL)[0]
    return data == content + seal(content)


def _is_usable(path: Path) -> bool:
    """Return whether the extension of a cache exists and is undamaged.

    Raises:
        NotSupportedError: another user can write to it or to the cache.
    """
    from ...base import trust

    if not os.path.exists(path):
        return False
    _check_cache(path.parent)
    if doubt := trust.doubt(path):
        raise _not_supported(
            f"the torch extension {path} is not used, because {doubt}; delete it, so that it is "
            "built again"
        )
    return is_whole(path)


def _check_cache(cache: Path) -> None:
    from ...base import trust

    if doubt := trust.doubt(cache):
        raise _not_supported(
            f"the cache directory {cache} for the torch extension is not used, because {doubt}: "
            "its files become part of the program; set UMEM_TORCH_EXT_CACHE to a directory of "
            "your own that no other user can write to"
        )


def load(
    cache_dir: Path | None = None, log: Log = say, *, package_dirs: Sequence[Path] | None = None
) -> ModuleType:
    """Return the extension module, built if necessary and imported once per process.

    libumem.so must be loaded already (importing `umem._core` does that), so that the extension
    uses the same runtime.

    Raises:
        NotSupportedError: as in `find_or_build`, or the file cannot be loaded.
    """
    if NAME in sys.modules:
        return sys.modules[NAME]
    path = find_or_build(cache_dir, log, package_dirs=package_dirs)
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise _not_supported(
            f"the torch extension {path} cannot be loaded ({error}); delete the file, so that it "
            "is built again"
        ) from error
    sys.modules[NAME] = module
    return module


def cuda_problem() -> str | None:
    """Return why a build on this machine has no CUDA part; None if it has one."""
    version = _torch().version.cuda
    if version is None:
        return "this torch is built without CUDA"
    candidates = _cuda_include_dirs(version)
    if _cuda_include(version) is not None:
        return None
    places = ", ".join(map(str, candidates))
    major = version.partition(".")[0]
    return (
        f"the headers of CUDA {major} (cuda_runtime_api.h), which the build of the torch extension "
        f"needs, are in none of {places}; run `pip install 'nvidia-cuda-runtime=={major}.*'`, or "
        "set CUDA_HOME to the toolkit"
    )


def _cuda_include_dirs(version: str) -> list[Path]:
    """Return the directories to search for CUDA's headers: torch's wheels, and toolkits."""
    nvidia = importlib.util.find_spec("nvidia")
    wheels = [Path(place) for place in (nvidia.submodule_search_locations or [])] if nvidia else []
    dirs = [wheel / f"cu{version.partition('.')[0]}" for wheel in wheels]
    dirs += [wheel / "cuda_runtime" for wheel in wheels]
    if home := os.environ.get("CUDA_HOME"):
        dirs.append(Path(home))
    if nvcc := shutil.which("nvcc"):
        dirs.append(Path(nvcc).resolve().parent.parent)
    dirs.append(Path("/usr/local/cuda"))
    return [path / "include" for path in dirs]


def _cuda_include(version: str) -> Path | None:
    """Return the first folder with CUDA headers of torch's major version."""
    for folder in _cuda_include_dirs(version):
        header = folder / "cuda_runtime_api.h"
        if os.path.isfile(header) and os.path.isfile(folder / "cuda.h"):
            found = _CUDART_VERSION.search(header.read_text(errors="replace"))
            if found and int(found[1]) // 1000 == int(version.partition(".")[0]):
                return folder
    return None


def key(sources: Path, with_cuda: bool) -> str:
    """Return the build key, 16 hex digits: extensions of equal keys are interchangeable.

    It depends on torch, Python, the platform, and the contents of the sources and of the runtime's
    headers. The compiler is not part of it: an installed extension must work without a compiler.
    """
    torch = _torch()
    digest = hashlib.sha256()
    for part in (
        torch.__version__,
        str(torch._C._GLIBCXX_USE_CXX11_ABI),
        sys.implementation.cache_tag,
        sysconfig.get_platform(),
        f"CUDA {torch.version.cuda}" if with_cuda else "no CUDA",
        *_compile_options(),
    ):
        digest.update(f"{part}\0".encode())
    for path in inputs(sources, with_cuda):
        digest.update(f"{path.relative_to(sources)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def inputs(sources: Path, with_cuda: bool) -> list[Path]:
    """Return the C++ files of the extension, and the headers of umem that they include."""
    waiting = _units(sources, with_cuda)
    if not waiting:
        raise _not_supported(
            f"{sources / 'torch_ext'} has no C++ sources of the torch extension; "
            "install umem again with `pip install .` in its source tree"
        )
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [sources / name for name in _INCLUDE.findall(path.read_text())]
    return sorted(found)


def _units(sources: Path, with_cuda: bool) -> list[Path]:
    folder = sources / "torch_ext"
    cuda = (folder / "cuda").glob("*.cpp") if with_cuda else ()
    return sorted([*folder.glob("*.cpp"), *cuda])


def _batches(sources: Path, with_cuda: bool, jobs: int) -> list[list[Path]]:
    """Divide the units among so many compilers; most of their time goes into torch's headers."""
    units = _units(sources, with_cuda)
    each = -(-len(units) // jobs)
    return [units[i : i + each] for i in range(0, len(units), each)]


def compiled_together(units: Sequence[Path]) -> list[str]:
    """Return a compiler's arguments that compile the files as one unit."""
    included = [word for unit in units for word in ("-include", str(unit))]
    return [*included, "-c", "-x", "c++", os.devnull]


def _file_name(build_key: str) -> str:
    return f"{NAME}-{build_key}.so"


def _compile_options() -> list[str]:
    # NDEBUG must be as in torch's own build: the layout of RecordFunction depends on it.
    return ["-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]


def compile_flags(sources: Path, with_cuda: bool) -> list[str]:
    """Return the compiler flags for the C++ files of the extension."""
    torch = _torch()
    include = Path(torch.__file__).parent / "include"
    if not os.path.isfile(include / "ATen" / "record_function.h"):
        raise _not_supported(
            f"this torch has no C++ headers in {include}; install torch from its wheels"
        )
    python = dict.fromkeys(sysconfig.get_path(name) for name in ("include", "platinclude"))
    if not any(os.path.isfile(Path(path) / "Python.h") for path in python):
        raise _not_supported(
            f"Python.h is not in {next(iter(python))}; install Python's development files "
            "(Debian and Ubuntu: apt install python3-dev)"
        )
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    flags = [*_compile_options(), f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{sources}"]
    for path in (include, include / "torch" / "csrc" / "api" / "include", *python):
        flags += ["-isystem", str(path)]
    if with_cuda:
        flags += ["-DUMEM_WITH_CUDA", "-isystem", str(_cuda_include(torch.version.cuda))]
        # torch's wheels lack one file of CUDA; umem's is searched last, so that a real one wins.
        flags += ["-idirafter", str(sources / "torch_ext" / "cuda" / "shim")]
    return flags


def _link_flags(library_dir: Path, with_cuda: bool) -> list[str]:
    torch_lib = Path(_torch().__file__).parent / "lib"
    return [
        *(f"-L{path}" for path in (torch_lib, library_dir)),
        *("-ltorch_cpu", "-lc10", *(["-lc10_cuda"] if with_cuda else []), "-lumem"),
        # Not by -Wl, which would split a path with a comma.
        *("-Xlinker", "-rpath", "-Xlinker", f"$ORIGIN:{library_dir}"),
    ]


def _find_compiler(cxx: str | None) -> list[str]:
    wanted = cxx or os.environ.get("CXX")
    if wanted:
        command = shlex.split(wanted)
        if not command or shutil.which(command[0]) is None:
            raise _not_supported(
                f"the C++ compiler {wanted!r} (from $CXX) was not found; correct or unset CXX"
            )
        return command
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise _not_supported(
        "the torch extension must be built once, but no C++ compiler was found "
        f"({', '.join(_COMPILERS)}, or the one in $CXX); install one "
        "(Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++; "
        "conda: conda install cxx-compiler), or install a wheel that has the extension, built on "
        "another machine next to this version of torch, in umem's source tree: "
        "pip wheel --no-build-isolation --no-deps ."
    )


def _default_jobs() -> int:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory // _COMPILER_BYTES))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def _check(results: Sequence[subprocess.CompletedProcess[str]], work: Path, log_path: Path) -> None:
    failed = [result for result in results if result.returncode != 0]
    if not failed:
        return
    text = "\n".join(f"$ {shlex.join(r.args)}\n{r.stdout}" for r in failed)
    log = work / "log"
    log.write_text(text)
    log.replace(log_path)  # writing to it would follow a link
    lines = [line for r in failed for line in r.stdout.splitlines() if "error" in line.lower()]
    shown = "\n".join((lines or failed[0].stdout.splitlines())[:_LOG_LINES])
    raise _not_supported(
        f"the torch extension does not compile with {failed[0].args[0]} for torch "
        f"{_torch().__version__}; it needs a C++20 compiler (g++ 11, clang 14 or newer).\n{shown}\n"
        f"The full log is in {log_path}."
    )


@contextlib.contextmanager
def _locked(path: Path, log: Log) -> Iterator[None]:
    """Hold the file lock `path`, which the kernel releases if the process dies."""
    file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("another process is building the torch extension; waiting for it ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def own_dirs() -> list[Path]:
    """Return the package's directories: of the source tree, and of an installed package."""
    package = sys.modules.get("umem")
    joined = [Path(path) for path in getattr(package, "__path__", [])]
    return list(dict.fromkeys([_PACKAGE, *joined]))


def _source_dir(package_dirs: Sequence[Path]) -> Path:
    candidates = [
        _PACKAGE.parent / "src",
        *(path / "_src" for path in [_PACKAGE, *package_dirs]),
    ]
    for candidate in candidates:
        if os.path.isfile(candidate / "torch_ext" / "module.cpp"):
            return candidate
    raise _not_supported(
        "the sources of the torch extension are not in any of "
        f"{', '.join(map(str, candidates))}; install umem again with `pip install .`"
    )


def _library_dir(package_dirs: Sequence[Path]) -> Path:
    for path in package_dirs:
        if os.path.isfile(path / LIBRARY):
            return path
    raise _not_supported(
        f"{LIBRARY} is not in {', '.join(map(str, package_dirs))}; install umem with "
        "`pip install .` in its source tree"
    )


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise _not_supported(
            "this user has no home directory for the cache of the torch extension; set HOME, or "
            "UMEM_TORCH_EXT_CACHE to a directory"
        ) from None


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise _not_supported(
            f"torch cannot be imported ({error}); install it with `pip install torch`"
        ) from error
    return torch


def _not_supported(message: str) -> Exception:
    # setup.py loads this file before the package exists.
    try:
        from umem.errors import NotSupportedError
    except ImportError:
        return RuntimeError(message)
    return NotSupportedError(message)
