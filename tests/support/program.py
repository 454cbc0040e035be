"""Programs of a few lines, each in a Python of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping

# 8 MiB is the floor of one thread.
PREAMBLE = """
import gc, os, signal, sys, threading, time
import torch
torch.set_num_threads(1)
import umem
from umem.base.native import core
MIB = 1 << 20
umem.enable(budget="8MiB", device="soft", policy=os.environ.get("TEST_POLICY", "lru"))
def blocks(n, mib=2):
    return [torch.full((mib * MIB // 4,), float(i)) for i in range(n)]
def intact(tensors):
    return all(bool(t.eq(float(i)).all()) for i, t in enumerate(tensors))
"""


def spawn(code: str, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Starts `code` in a group of its own, for `finish`; its output and error are pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
        start_new_session=True,
    )  # fmt: skip


def start(code: str, **environ: str) -> subprocess.Popen[str]:
    """Starts `code` behind the preamble; its standard output and error are pipes."""
    return spawn(PREAMBLE + textwrap.dedent(code), os.environ | environ)


def finish(process: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
    """Standard output and error at the process's end; AssertionError, and its end, if it hangs."""
    try:
        return process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its children have the pipes too
        out, err = process.communicate()
        raise AssertionError(f"it hangs; so far: {out}{err}") from None


def run(code: str, timeout: float = 60, **environ: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `code` behind the preamble."""
    process = start(code, **environ)
    out, err = finish(process, timeout)
    return process.returncode, out, err
