"""Programs of a few lines, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import textwrap

from support import forkserver

# 8 MiB is the floor of one thread.
PREAMBLE = """
import gc, os, signal, sys, threading, time
import torch
torch.set_num_threads(1)
import _core_testing, umem
from umem.base.native import core
MIB = 1 << 20
umem.enable(budget="8MiB", device="soft", policy=os.environ.get("TEST_POLICY", "lru"))
def blocks(n, mib=2):
    return [torch.full((mib * MIB // 4,), float(i)) for i in range(n)]
def intact(tensors):
    return all(bool(t.eq(float(i)).all()) for i, t in enumerate(tensors))
"""


def start(
    code: str, *, fresh: bool = False, **environ: str
) -> forkserver.Process | subprocess.Popen[str]:
    """Starts `code` behind the preamble, as `forkserver.start` does."""
    words = ["-c", PREAMBLE + textwrap.dedent(code)]
    return forkserver.start(words, os.environ | environ, fresh=fresh)


def run(
    code: str, timeout: float = 60, *, fresh: bool = False, **environ: str
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `code`, as `start` starts it."""
    process = start(code, fresh=fresh, **environ)
    out, err = forkserver.finish(process, timeout)
    assert process.returncode is not None
    return process.returncode, out, err
