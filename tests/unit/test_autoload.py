"""Costs and effects of `import torch` and `import umem`, in fresh interpreters."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support import forkserver

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


def python(code: str, cwd: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(code)],
        cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False,
        timeout=180,
    )  # fmt: skip


def test_importing_umem_is_fast_and_needs_no_torch(tmp_path: Path) -> None:
    code = """
        import sys, time
        sys.modules["torch"] = None  # any import of it fails
        sys.modules["numpy"] = None
        begin = time.process_time()  # others may be at work on this machine
        import umem
        umem.enable, umem.stats, umem.ConfigError
        print(time.process_time() - begin)
    """
    seconds = []
    for _ in range(3):
        done = python(code, tmp_path)
        assert done.returncode == 0, done.stderr
        seconds.append(float(done.stdout))
    assert min(seconds) < 0.3


def test_autoload_when_off_loads_nothing(tmp_path: Path) -> None:
    code = """
        import sys
        from _umem_autoload import init
        init()
        print(sorted(name for name in sys.modules if "umem" in name))
    """
    for value in ("", "off", "0", " No "):
        done = python(code, tmp_path, UMEM=value)
        assert done.stdout.strip() == "['_umem_autoload']", done.stderr


def test_autoload_without_torch_warns_once_and_goes_on(tmp_path: Path) -> None:
    code = """
        import sys
        sys.modules["torch"] = None
        from _umem_autoload import init
        init()
        print("alive")
    """
    done = python(code, tmp_path, UMEM="1")
    assert done.stdout == "alive\n"
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("umem: stays off, torch is unchanged: ")


@needs_torch
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("UMEM_BUDGET", "banana", "'banana'"),
        ("UMEM_BUGET", "1GiB", "UMEM_BUDGET"),
        ("UMEM", "perhaps", "'perhaps'"),
        ("UMEM_BUDGET", "1MiB", "below the floor"),
        ("UMEM_DEVICE", "cuda", "built without CUDA|no NVIDIA driver"),
        ("UMEM_ALLOCATOR", "pool", "with umem.enable():"),
    ],
)
def test_a_bad_option_is_one_warning_and_torch_works(
    tmp_path: Path, name: str, value: str, words: str
) -> None:
    code = """
import os, sys
os.environ["UMEM"] = "1"
os.environ[sys.argv[1]] = sys.argv[2]
import torch, umem
torch._import_device_backends()  # as at the end of `import torch`
print(float(torch.ones(3).sum()), umem.is_enabled())
"""
    done = forkserver.run(["-c", code, name, value], folder=tmp_path)
    assert done.stdout == "3.0 False\n"
    lines = [line for line in done.stderr.splitlines() if "umem" in line]
    assert len(lines) == 1
    assert any(each in lines[0] for each in words.split("|"))  # by torch's build


@needs_torch
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_warning_that_cannot_be_written_breaks_nothing(tmp_path: Path) -> None:
    code = "import sys; sys.stderr = open('/dev/full', 'w', buffering=1); import torch; print(1)"
    assert python(code, tmp_path, UMEM="1", UMEM_BUDGET="banana").stdout == "1\n"


@needs_torch
def test_strict_ends_the_program_with_one_line(tmp_path: Path) -> None:
    done = python("import torch", tmp_path, UMEM="1", UMEM_STRICT="1", UMEM_BUDGET="banana")
    assert done.returncode == 2
    assert done.stderr.startswith("umem: error: UMEM_BUDGET: 'banana'")
    assert done.stderr.count("\n") == 1


@needs_torch
def test_umem_in_the_environment_turns_it_on(tmp_path: Path) -> None:
    code = """
        import torch, umem
        x = torch.full((1 << 22,), 2.0)
        assert umem.is_enabled()
        assert umem.stats().live_bytes >= x.nbytes, umem.stats()
        print(float(x.sum()), umem.stats().budget_bytes)
    """
    done = python(code, tmp_path, UMEM="1", UMEM_BUDGET="1GiB", UMEM_DEVICE="soft")
    assert done.stdout == f"{float(2 << 22)} {1 << 30}\n", done.stderr


@needs_torch
def test_without_umem_in_the_environment_torch_is_itself(tmp_path: Path) -> None:
    code = """
        import sys, torch
        print([n for n in sys.modules if n.startswith("umem")])
    """
    done = python(code, tmp_path)
    assert done.stdout.strip() == "[]", done.stderr


@needs_torch
def test_a_script_of_the_users_may_be_named_umem(tmp_path: Path) -> None:
    """torch loads the hook in every program, and the script's folder comes first."""
    script = tmp_path / "umem.py"
    script.write_text("import torch; print(float(torch.ones(3).sum()))")
    for value, words in (("", ""), ("1", f"{script} hides the package umem")):
        done = subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, env={**os.environ, "UMEM": value},
            capture_output=True, text=True, check=False, timeout=180,
        )  # fmt: skip
        assert done.stdout.splitlines()[-1] == "3.0"
        assert words in done.stderr
        assert bool(words) == bool(done.stderr)
