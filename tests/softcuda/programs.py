"""Small programs that run on the software driver, each in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from support import forkserver

HERE = Path(__file__).resolve().parent
# A Python with the CUDA build of torch; the one that runs the tests if it has it.
PYTHON_VARIABLE = "SOFTCUDA_PYTHON"

DRIVER = f"""
import ctypes, os, re, sys, threading
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from pathlib import Path
sys.path.insert(0, {str(HERE)!r})
import load
ROOT, MIB = Path({str(HERE)!r}).parents[1], 1 << 20
INVALID_VALUE, OUT_OF_MEMORY, NOT_READY = 1, 2, 600
soft = load.load()
d = soft.driver

class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]

def ok(result):
    assert result == 0, result

def context(device=0):
    ok(d.cuInit(0))
    handle = c_void_p()
    ok(d.cuDevicePrimaryCtxRetain(byref(handle), device))
    ok(d.cuCtxSetCurrent(handle))

def proc_address(name, version):
    function, result = c_void_p(), c_int()
    d.cuGetProcAddress_v2(name.encode(), byref(function), version, c_uint64(0), byref(result))
    return function.value or 0

def managed(size):
    ptr = c_uint64()
    ok(d.cuMemAllocManaged(byref(ptr), c_size_t(size), 1))
    return ptr

def free_bytes():
    free, total = c_size_t(), c_size_t()
    ok(d.cuMemGetInfo_v2(byref(free), byref(total)))
    return free.value

def new_stream(flags=1):
    stream = c_void_p()
    ok(d.cuStreamCreate(byref(stream), flags))
    return stream

def new_event():
    event = c_void_p()
    ok(d.cuEventCreate(byref(event), 2))
    return event

def fill(ptr, value, size, stream):
    ok(d.cuMemsetD8Async(ptr, c_ubyte(value), c_size_t(size), stream))

def prefetch(ptr, size, device):
    ok(d.cuMemPrefetchAsync_v2(ptr, c_size_t(size), Location(1, device), 0, None))

def discard(ptr, size, stream):
    return d.cuMemDiscardBatchAsync(
        byref(ptr), byref(c_size_t(size)), c_size_t(1), c_uint64(0), stream)
"""

TORCH = f"""
import ctypes, os, sys, warnings
os.environ["OMP_NUM_THREADS"] = "1"  # for equal bits in any order of work
sys.path.insert(0, {str(HERE)!r})
import load
soft = load.load()
import torch, torch._dynamo, torch._meta_registrations  # for load.compute(), in 3 s
MIB = 1 << 20
def pattern(n, start=0):
    return torch.arange(start, start + n, dtype=torch.int32)
"""


def reason_without_libraries() -> str | None:
    """Why programs on the driver cannot run here, or None."""
    folder = os.environ.get("SOFTCUDA_LIB")
    if not folder:
        return "SOFTCUDA_LIB is not set: build the software driver with tests/softcuda/build.py"
    if not (Path(folder) / "libcuda.so.1").exists():
        return f"there is no libcuda.so.1 in SOFTCUDA_LIB={folder}"
    return None


def torch_python() -> str:
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


def reason_without_torch() -> str | None:
    """Why programs on the CUDA build of torch cannot run here, or None."""
    if (reason := reason_without_libraries()) is not None:
        return reason
    code = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    found = subprocess.run(
        [torch_python(), "-c", code], capture_output=True, text=True, check=False
    )
    if not (Path(found.stdout.strip() or "/nonexistent") / "lib" / "libtorch_cuda.so").exists():
        return f"{torch_python()} has no CUDA build of torch; name one that has: {PYTHON_VARIABLE}"
    return None


def _run(
    python: str, code: str, expected: int, environ: dict[str, str], prepare: str = ""
) -> tuple[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SOFTCUDA_")}
    done = forkserver.run(
        ["-c", code],
        inherited | {"SOFTCUDA_LIB": os.environ["SOFTCUDA_LIB"]} | environ,
        prepare=prepare, fresh=not prepare, python=python,
    )  # fmt: skip
    assert done.returncode == expected, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout, done.stderr


def driver_program(code: str, expected: int = 0, **environ: str) -> tuple[str, str]:
    """Runs `code` with ctypes on the driver; its output and standard error.

    AssertionError, with both, if it does not exit with `expected`.
    """
    return _run(sys.executable, DRIVER + textwrap.dedent(code), expected, environ)


def torch_program(code: str, expected: int = 0, **environ: str) -> tuple[str, str]:
    """Runs `code` with the CUDA build of torch on the driver, as `driver_program` does."""
    return _run(torch_python(), TORCH + textwrap.dedent(code), expected, environ, TORCH)
