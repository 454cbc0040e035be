"""Programs that use a GPU, or the software driver instead, each in its own Python."""

from __future__ import annotations

import importlib.metadata
import os
import textwrap
from pathlib import Path

import pytest

from support import forkserver

TESTS = Path(__file__).resolve().parents[1]

IMPORTS = f"""
import ctypes, gc, os, sys, threading, time, warnings
sys.path.insert(0, {str(TESTS)!r})
from softcuda import load
soft = load.load() if os.environ.get(load.LIBRARY_VARIABLE) else None
import torch
import umem
"""
# One thread, for equal bits in any order of work. Optimizers, and the kernels of load.compute(),
# import torch._dynamo, which takes 3 s.
PREPARE = f"""
import os
os.environ["OMP_NUM_THREADS"] = "1"
{IMPORTS}
import torch._dynamo, torch._meta_registrations, umem.session.session, umem.trace.step_builder
"""
PREAMBLE = f"""{IMPORTS}
MIB = 1 << 20
def enable(budget="32MiB", **options):
    return umem.enable(budget=budget, device="cuda", **options)
def blocks(count, mib=2):
    return [torch.full((mib * MIB // 4,), float(i), device="cuda") for i in range(count)]
def intact(tensors):
    return all(bool(t.cpu().eq(float(i)).all()) for i, t in enumerate(tensors))
"""


def needs_torch(version: str) -> pytest.MarkDecorator:
    """Skips under an older torch; `version` is "2.14"."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(".")[:2]]

    installed = importlib.metadata.version("torch")
    return pytest.mark.skipif(
        numbers(installed) < numbers(version), reason=f"torch {version} has it, not {installed}"
    )


def program(
    code: str, expected: int = 0, timeout: float = 120, *, fresh: bool = False,
    **environ: str | None,
) -> tuple[str, str]:  # fmt: skip
    """Runs `code` behind the preamble; its output and standard error.

    fresh: in a Python that has imported nothing; else in a fork of one that has (`forkserver`).
    None takes a variable out of the environment. AssertionError, with both, if it does not exit
    with `expected` in `timeout` seconds.
    """
    env = dict(os.environ)
    for name, value in environ.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    words = ["-c", PREAMBLE + textwrap.dedent(code)]
    done = forkserver.run(words, env, timeout=timeout, prepare=PREPARE, fresh=fresh)
    assert done.returncode == expected, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout, done.stderr


def worker(path: Path, *arguments: str, timeout: float) -> str:
    """Runs a program of tests/gpu on the software driver alone; its output.

    It inherits no setting for the driver and for umem except the driver's path.
    """
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SOFTCUDA_", "UMEM_"))}
    environ |= {"SOFTCUDA_LIB": os.environ["SOFTCUDA_LIB"], "SOFTCUDA_BYTES": str(1 << 30)}
    done = forkserver.run([str(path), *arguments], environ, timeout=timeout, prepare=PREPARE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
