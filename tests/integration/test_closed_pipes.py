"""Commands whose reader has exited, as in ``umem doctor | head -1``: they end silently."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")

from support import forkserver

from umem.cli import COMMANDS
from umem.monitor import server

PROGRAM = """
import torch
from torch import nn

def make_step():
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, optimizer, torch.randn(512, 64), lambda model, x: model(x).sum()

def breaks():
    raise BrokenPipeError("the program's own")
"""
TRACE = """\
{"kind":"umem-trace","v":1,"device":"","source":"a test","note":""}
{"e":"alloc","id":0,"bytes":8388608,"tag":"activation"}
{"e":"op","i":0,"name":"op","r":[],"w":[0],"us":5}
{"e":"free","id":0}
{"e":"step"}
"""
CALLS = (
    "--help",
    "--version",
    *(f"{command} --help" for command in COMMANDS),
    "trace record --help",
    "doctor",
    "doctor --json",
    "plan program:make_step --json",
    "estimate --params 1e9",
    "lint program:make_step",
    "replay trace.jsonl",
    "replay trace.jsonl --json",
    "trace info trace.jsonl",
    pytest.param("demo --quick --workload gpt", marks=pytest.mark.nightly),
    f"top --interval 0.01 {os.getpid()}",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "trace.jsonl").write_text(TRACE)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    return tmp_path


# Its output has no reader from the start.
CLOSED = """
import os, runpy, sys
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
runpy.run_module("umem", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.replace(str(os.getpid()), "PID"))
def test_a_closed_pipe_ends_a_command_quietly(call: str, folder: Path) -> None:
    server.start(call.startswith("top --i"), lambda: {"device": "", "policy": "", "allocator": ""})
    try:
        done = forkserver.run(["-c", CLOSED, *call.split()], folder=folder)
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
    finally:
        server.stop()


@pytest.mark.parametrize("call", ["doctor", "plan program:make_step"])
def test_so_does_a_reader_of_one_line(call: str, folder: Path) -> None:
    # Each line is a write, and most of them are too late.
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = forkserver.start(["-m", "umem", *call.split()], environ, folder, fresh=True)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stderr:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    # All of it may lie in the pipe before the reader closes it, which nothing can tell.
    assert process.wait(timeout=60) in (0, 128 + signal.SIGPIPE)


def test_a_broken_pipe_of_the_program_is_its_error(folder: Path) -> None:
    done = forkserver.run(["-m", "umem", "plan", "program:breaks"], folder=folder)
    assert "the program's own" in done.stderr
    assert done.returncode not in (0, 128 + signal.SIGPIPE)
