"""Finding and building the torch extension, with small sources and compilers of the test's own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.terminal import on_a_terminal

pytest.importorskip("torch")

from umem.base import trust
from umem.errors import NotSupportedError
from umem.integrations.torch import build

ROOT = Path(__file__).resolve().parents[2]

# Records each call, takes a while, and makes the requested file.
RECORDING_COMPILER = """\
#!/bin/sh
echo "$@" >> "{calls}"
sleep 0.3
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then : > "$2"; fi
  shift
done
"""


@dataclass
class Project:
    """A source tree, a package directory with a libumem.so, a compiler and a cache."""

    root: Path

    @property
    def sources(self) -> Path:
        return self.root / "src"

    @property
    def package(self) -> Path:
        return self.root / "package"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def calls(self) -> list[str]:
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def compiler(self, text: str = RECORDING_COMPILER) -> str:
        path = self.root / "compiler"
        path.write_text(text.format(calls=self.root / "calls"))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    def find_or_build(self, cxx: str | None = None, log: list[str] | None = None) -> Path:
        return build.find_or_build(
            self.cache,
            (log if log is not None else []).append,
            package_dirs=[self.package],
            sources=self.sources,
            cxx=cxx,
        )


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    for name, text in {
        "torch_ext/module.cpp": '#include <vector>\n#include "torch_ext/part.h"\nint a;\n',
        "torch_ext/part.h": '#include "runtime/hooks.h"\n',
        "runtime/hooks.h": "// hooks\n",
        "runtime/other.h": "// not included\n",
    }.items():
        path = made.sources / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    made.package.mkdir()
    (made.package / build.LIBRARY).write_bytes(b"")
    return made


def test_builds_once_and_says_so(project: Project) -> None:
    log: list[str] = []
    cxx = project.compiler()
    built = project.find_or_build(cxx, log)
    assert built.parent == project.cache
    assert built.is_file()
    assert len(log) == 1
    assert "building the torch extension for torch" in log[0]
    assert len(project.calls) == 2  # one unit, one link
    assert project.find_or_build(cxx, log) == built
    assert len(log) == 1
    assert len(project.calls) == 2
    assert list(project.cache.glob("build-*")) == []


def test_the_installed_extension_comes_first_and_needs_no_compiler(project: Project) -> None:
    build.build(
        project.package,
        package_dirs=[project.package],
        sources=project.sources,
        cxx=project.compiler(),
    )
    found = project.find_or_build("no-such-compiler")
    assert found.parent == project.package
    assert not project.cache.exists()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("torch_ext/module.cpp", True),
        ("torch_ext/part.h", True),
        ("runtime/hooks.h", True),
        ("runtime/other.h", False),
    ],
)
def test_key_follows_the_files_that_are_compiled(
    project: Project, name: str, changes: bool
) -> None:
    before = build.key(project.sources, False)
    path = project.sources / name
    path.write_text(path.read_text() + "// changed\n")
    assert (build.key(project.sources, False) != before) is changes


def test_key_follows_the_torch_version(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    before = build.key(project.sources, False)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert build.key(project.sources, False) != before


FIND_OR_BUILD = """
import sys
from pathlib import Path
from umem.integrations.torch import build
root, cxx = Path(sys.argv[1]), sys.argv[2]
build.find_or_build(root / "cache", package_dirs=[root / "package"], sources=root / "src", cxx=cxx)
print("built")
"""


def of_three_units(project: Project) -> tuple[str, ...]:
    """The command that builds an extension of three units with recording compilers."""
    for name in ("one", "two"):
        (project.sources / "torch_ext" / f"{name}.cpp").write_text("int c;\n")
    return sys.executable, "-c", FIND_OR_BUILD, str(project.root), project.compiler()


COMPILERS = -(-3 // -(-3 // build._default_jobs()))  # for three units


def test_a_terminal_shows_how_many_compilers_are_done(project: Project) -> None:
    pytest.importorskip("rich")
    found = on_a_terminal(*of_three_units(project))
    assert (found.code, found.out) == (0, "built\n")
    assert "umem: building the torch extension for torch" in found.terminal
    assert "compiling" in found.terminal
    # All of them, and before the link: alone for at least 0.3 s.
    assert f"{100 * COMPILERS / (COMPILERS + 1):.0f}%" in found.terminal


def test_elsewhere_a_build_says_one_line(project: Project) -> None:
    done = subprocess.run(of_three_units(project), capture_output=True, text=True, check=True)
    assert done.stdout == "built\n"
    seconds = build.SECONDS if build.cuda_problem() is not None else build.SECONDS_CUDA
    assert re.fullmatch(
        rf"umem: building the torch extension for torch \S+ \(once, ~{seconds} s\) \.\.\.\n",
        done.stderr,
    )


@pytest.mark.parametrize("gone_after", ["building the torch", "compiling"])
def test_a_build_goes_on_where_its_terminal_has_gone(project: Project, gone_after: str) -> None:
    pytest.importorskip("rich")
    found = on_a_terminal(*of_three_units(project), gone_after=gone_after)
    assert (found.code, found.out) == (0, "built\n")
    assert gone_after in found.terminal
    assert len(project.calls) == COMPILERS + 1


@pytest.mark.parametrize("stderr", ["2>&-", "2</dev/null"], ids=["closed", "not to be written"])
def test_so_it_does_where_nothing_can_be_said(project: Project, stderr: str) -> None:
    words = shlex.join(of_three_units(project))
    done = subprocess.run(
        ["sh", "-c", f"{words} {stderr}"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("built\n", "")
    assert len(project.calls) == COMPILERS + 1


def test_second_process_waits_for_the_first(project: Project) -> None:
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from umem.integrations.torch import build as torch_build
        root, cxx = Path(sys.argv[1]), sys.argv[2]
        print(torch_build.find_or_build(
            root / "cache", package_dirs=[root / "package"], sources=root / "src", cxx=cxx))
        """
    )
    command = [sys.executable, "-c", program, str(project.root), project.compiler()]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert sum("building the torch extension" in err and "(once" in err for _, err in outputs) == 1
    assert len(project.calls) == 2


@pytest.mark.parametrize(
    ("cores", "memory_gib", "jobs"), [(16, 128, 16), (16, 8, 4), (2, 64, 2), (4, 1, 1)]
)
def test_a_build_uses_the_cores_that_memory_suffices_for(
    monkeypatch: pytest.MonkeyPatch, cores: int, memory_gib: int, jobs: int
) -> None:
    figures = {"SC_PHYS_PAGES": memory_gib << 18, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(build.os, "sysconf", figures.__getitem__)
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert build._default_jobs() == jobs


def test_no_compiler_names_what_to_install(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(project.root))
    with pytest.raises(NotSupportedError, match=r"no C\+\+ compiler.*apt install g\+\+"):
        project.find_or_build()


def test_wrong_cxx_is_named(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NotSupportedError, match=r"'no-such-compiler'.*CXX"):
        project.find_or_build()


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_compile_error_shows_its_first_lines_and_the_log(project: Project) -> None:
    (project.sources / "torch_ext" / "module.cpp").write_text("int main() { return nonsense; }\n")
    with pytest.raises(NotSupportedError) as caught:
        project.find_or_build("c++")
    message = str(caught.value)
    assert "nonsense" in message
    log = Path(message.rsplit("The full log is in ", 1)[1].rstrip("."))
    assert "nonsense" in log.read_text()
    assert list(project.cache.glob("*.so")) == []


def test_a_failed_link_leaves_nothing_that_could_be_loaded(project: Project) -> None:
    failing = RECORDING_COMPILER.replace(
        "sleep 0.3", 'case "$*" in *-shared*) echo "ld: error: broken"; exit 1;; esac'
    )
    with pytest.raises(NotSupportedError, match="ld: error: broken"):
        project.find_or_build(project.compiler(failing))
    assert list(project.cache.glob("*.so")) == []


def test_cache_that_cannot_be_written_names_the_option(project: Project) -> None:
    project.cache.write_text("a file, not a directory")
    with pytest.raises(NotSupportedError, match="UMEM_TORCH_EXT_CACHE"):
        project.find_or_build(project.compiler())


def test_missing_library_and_sources_say_how_to_install(project: Project) -> None:
    (project.package / build.LIBRARY).unlink()
    with pytest.raises(NotSupportedError, match=r"libumem\.so.*pip install"):
        project.find_or_build(project.compiler())
    (project.sources / "torch_ext" / "module.cpp").unlink()
    with pytest.raises(NotSupportedError, match="pip install"):
        project.find_or_build(project.compiler())


def test_a_file_that_is_no_extension_is_a_clear_error(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, build.NAME, raising=False)
    monkeypatch.setattr(build, "_source_dir", lambda _dirs: project.sources)
    broken = project.find_or_build(project.compiler())
    broken.write_bytes(b"not a library" + build.seal(b"not a library"))
    with pytest.raises(NotSupportedError, match="cannot be loaded"):
        build.load(project.cache, package_dirs=[project.package])
    assert build.NAME not in sys.modules


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    changed = {
        "empty": b"",
        "cut off": content[:-1],
        "longer": content + b"x",
        "other bytes": b"x" + content,
        "no digest": content.partition(b"\numem sha256 ")[0],
    }
    path.write_bytes(changed[how])


DAMAGES = ["empty", "cut off", "longer", "other bytes", "no digest"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_extension_in_the_cache_is_built_again(project: Project, how: str) -> None:
    """Loading a file that is cut off would end the process by SIGBUS."""
    cxx = project.compiler()
    built = project.find_or_build(cxx)
    whole = built.read_bytes()
    damage(built, how)
    log: list[str] = []
    assert project.find_or_build(cxx, log) == built
    assert built.read_bytes() == whole
    assert f"{built} is incomplete or damaged" in log[0]
    assert project.find_or_build("no-such-compiler") == built


def test_a_damaged_extension_of_the_installation_is_passed_over(project: Project) -> None:
    cxx = project.compiler()
    installed = build.build(
        project.package, package_dirs=[project.package], sources=project.sources, cxx=cxx
    )
    damage(installed, "cut off")
    assert project.find_or_build(cxx).parent == project.cache


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_cache_that_others_can_write_is_refused(
    project: Project, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setattr(trust, "_is_private", lambda group, user: False)
    project.cache.mkdir()
    project.cache.chmod(mode)
    with pytest.raises(NotSupportedError) as caught:
        project.find_or_build(project.compiler())
    for words in (str(project.cache), "can write", "chmod", "UMEM_TORCH_EXT_CACHE"):
        assert words in str(caught.value)
    assert project.calls == []
    project.cache.chmod(0o700)
    project.find_or_build(project.compiler())
    project.cache.chmod(mode)  # existing files are not used either
    with pytest.raises(NotSupportedError, match="can write"):
        project.find_or_build("no-such-compiler")


@pytest.mark.parametrize("mode", [0o757, 0o775])
def test_an_extension_that_others_can_write_is_refused(
    project: Project, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setattr(trust, "_is_private", lambda group, user: False)
    built = project.find_or_build(project.compiler())
    built.chmod(mode)
    with pytest.raises(NotSupportedError, match="can write") as caught:
        project.find_or_build("no-such-compiler")
    assert f"{built} is not used" in str(caught.value)
    assert "delete it" in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("part", ["cache", "link to the cache", "extension"])
def test_what_belongs_to_another_user_is_refused(project: Project, part: str) -> None:
    built = project.find_or_build(project.compiler())
    if part == "link to the cache":
        project.cache.rename(project.root / "real")
        project.cache.symlink_to(project.root / "real")
        assert project.find_or_build("no-such-compiler") == built  # one's own link is fine
        os.chown(project.cache, 12345, -1, follow_symlinks=False)
    else:
        os.chown(project.cache if part == "cache" else built, 12345, -1)
    with pytest.raises(NotSupportedError, match="belongs to user 12345"):
        project.find_or_build("no-such-compiler")


def test_what_is_built_is_for_its_owner_whatever_the_umask(project: Project) -> None:
    old = os.umask(0)
    try:
        built = project.find_or_build(project.compiler())
    finally:
        os.umask(old)
    assert stat.S_IMODE(project.cache.stat().st_mode) == 0o700
    assert all(path.stat().st_mode & 0o022 == 0 for path in project.cache.iterdir())
    assert project.find_or_build("no-such-compiler") == built


def test_the_lock_and_the_log_follow_no_links(project: Project) -> None:
    precious = project.root / "precious"
    precious.write_text("precious")
    failing = project.compiler('#!/bin/sh\necho "error: no luck"; exit 1\n')
    with pytest.raises(NotSupportedError, match="no luck"):
        project.find_or_build(failing)
    (log,) = project.cache.glob("*.log")
    (lock,) = project.cache.glob("*.lock")
    log.unlink()
    log.symlink_to(precious)
    with pytest.raises(NotSupportedError, match="no luck"):
        project.find_or_build(failing)
    assert precious.read_text() == "precious"
    assert "no luck" in log.read_text()
    lock.unlink()
    lock.symlink_to(precious)
    with pytest.raises(NotSupportedError, match=lock.name):
        project.find_or_build(failing)
    assert precious.read_text() == "precious"


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_our_own_sources_compile_without_warnings() -> None:
    sources = ROOT / "src"
    if not (sources / "torch_ext").is_dir():
        pytest.skip("not in a source tree")
    flags = build.compile_flags(sources, False)
    (all_units,) = build._batches(sources, False, 1)  # so no two have a name in common
    command = ["c++", *flags, "-Werror", "-fsyntax-only", *build.compiled_together(all_units)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def cuda_project(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A source tree with a CUDA part, a torch with CUDA 13, and CUDA's headers in `root/home`."""
    import torch

    part = project.sources / "torch_ext" / "cuda" / "part.cpp"
    part.parent.mkdir()
    part.write_text("int b;\n")
    include = project.root / "home" / "include"
    include.mkdir(parents=True)
    (include / "cuda.h").touch()
    (include / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  13000\n")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(build, "_cuda_include_dirs", lambda _version: [include])
    return project


def test_the_cuda_part_is_built_where_torch_and_the_headers_have_it(cuda_project: Project) -> None:
    assert build.cuda_problem() is None
    cuda_project.find_or_build(cuda_project.compiler())
    compiled = [call for call in cuda_project.calls if " -c -x " in call]
    (linked,) = [call for call in cuda_project.calls if "-shared " in call]
    assert sum(call.count("/cuda/part.cpp") for call in compiled) == 1
    assert all("-DUMEM_WITH_CUDA" in call for call in compiled)
    assert all(f"-isystem {cuda_project.root}/home/include" in call for call in compiled)
    assert "-lc10_cuda" in linked


def test_without_cuda_in_torch_there_is_no_cuda_part(
    cuda_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    assert build.cuda_problem() == "this torch is built without CUDA"
    cuda_project.find_or_build(cuda_project.compiler())
    assert not any("/cuda/part.cpp" in call for call in cuda_project.calls)
    assert not any(
        "-DUMEM_WITH_CUDA" in call or "-lc10_cuda" in call for call in cuda_project.calls
    )


@pytest.mark.parametrize("change", ["missing", "other version"])
def test_without_cudas_headers_it_is_built_without_and_says_why(
    cuda_project: Project, change: str
) -> None:
    header = cuda_project.root / "home" / "include" / "cuda_runtime_api.h"
    if change == "missing":
        header.unlink()
    else:
        header.write_text("#define CUDART_VERSION 12080\n")
    problem = build.cuda_problem()
    assert problem is not None
    for words in ("CUDA 13", str(header.parent), "nvidia-cuda-runtime==13.*", "CUDA_HOME"):
        assert words in problem
    cuda_project.find_or_build(cuda_project.compiler())
    assert not any("UMEM_WITH_CUDA" in call for call in cuda_project.calls)


def test_an_extension_with_cuda_is_found_where_the_headers_are_gone(cuda_project: Project) -> None:
    built = build.build(
        cuda_project.package,
        package_dirs=[cuda_project.package],
        sources=cuda_project.sources,
        cxx=cuda_project.compiler(),
    )
    (cuda_project.root / "home" / "include" / "cuda_runtime_api.h").unlink()
    assert cuda_project.find_or_build("no-such-compiler") == built


def test_key_follows_the_cuda_part(cuda_project: Project) -> None:
    part = cuda_project.sources / "torch_ext" / "cuda" / "part.cpp"
    keys = [build.key(cuda_project.sources, with_cuda) for with_cuda in (False, True)]
    part.write_text("int c;\n")
    now = [build.key(cuda_project.sources, with_cuda) for with_cuda in (False, True)]
    assert keys[0] != keys[1]
    assert now[0] == keys[0]
    assert now[1] != keys[1]


def test_headers_are_taken_from_the_toolkit_that_cuda_home_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda _name: None)
    assert tmp_path / "include" in build._cuda_include_dirs("13.0")
